// What pages of figures share: an element with a text, and cards of facts.
"use strict";

function element(name, text, className) {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

// facts: [{name, value, note, exact}]; exact: the figure before it was rounded.
function show(facts) {
  const cards = facts.map((fact) => {
    const card = document.createElement("div");
    const value = element("b", fact.value);
    value.dataset.exact = fact.exact;
    card.append(element("span", fact.name, "faint"), value, element("span", fact.note, "faint"));
    return card;
  });
  document.getElementById("facts").replaceChildren(...cards);
}
