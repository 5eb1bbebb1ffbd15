// What pages of figures share: an element with a text, cards of facts, and lines of commands.
"use strict";

function element(name, text, className) {
  const made = document.createElement(name);
  made.textContent = text;
  if (className) made.className = className;
  return made;
}

function button(text, onClick, className) {
  const made = element("button", text, className);
  made.type = "button";
  if (onClick) made.addEventListener("click", onClick);
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

// Commands, each with its button (page.js).
function showCommands(lines) {
  const shown = lines.map((line) => {
    const row = element("div", "", "command");
    const words = element("pre", line, "wraps");
    words.tabIndex = 0;
    row.append(words, button("copy", null, "copy"));
    return row;
  });
  document.getElementById("commands").replaceChildren(...shown);
}
