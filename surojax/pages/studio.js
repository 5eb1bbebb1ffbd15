// Asks the server of surojax/studio.py for what the form's choices need. The choices are also the part of the address
// behind "#", so that an address shows what it showed before.
"use strict";

const form = document.getElementById("choices");
const said = document.getElementById("said");
const PAUSE_MS = 300; // after the last key, before an estimate is asked for
const REST_MS = 1200; // after an estimate, before its plan is compiled
const WATCH_MS = 5000; // between looks at a run
let asked = 0; // the number of the last question; answers to earlier ones are dropped
let estimated = ""; // what the last estimate said
let timer; // of the next question

function query() {
  const filled = [...new FormData(form)].filter(([, value]) => value !== "");
  return new URLSearchParams(filled).toString();
}

function say(text, kind) {
  said.textContent = text;
  said.className = kind || "";
}

// The answer to a question; null if there is none, which is said; undefined if another question was asked meanwhile.
async function answer(path, waits) {
  const number = ++asked;
  clearTimeout(timer);
  say(waits);
  const response = await fetch(`${path}?${query()}`).catch(() => null);
  if (number !== asked) return undefined;
  if (response === null) {
    say("surojax studio does not answer: has it ended?", "bad");
    return null;
  }
  const text = await response.text();
  if (number !== asked) return undefined;
  if (isRefusal(response)) {
    say(text, "bad");
    return null;
  }
  return text;
}

// Whether a response is a line that says why there is no answer.
function isRefusal(response) {
  return response.headers.get("Content-Type").startsWith("text/plain");
}

async function estimate() {
  history.replaceState(null, "", `#${query()}`);
  const text = await answer("estimate", "estimating ...");
  if (text === undefined) return;
  if (text === null) {
    show([]);
    document.getElementById("phases").textContent = "";
    document.getElementById("commands").textContent = "";
    return;
  }
  const found = JSON.parse(text);
  estimated = found.said;
  say(found.said, found.fits ? "good" : "bad");
  show(found.facts);
  const phases = found.phases.map((phase) => `${phase.name} ${phase.seconds.toLocaleString("en", { maximumSignificantDigits: 3 })}`);
  document.getElementById("phases").textContent = `seconds by phase, estimated: ${phases.join(", ")}`;
  document.getElementById("commands").textContent = `${found.train}\n${found.plan}`;
  document.getElementById("compile").disabled = !found.compiles;
  if (found.fits && found.compiles) timer = setTimeout(compile, REST_MS);
}

async function fit() {
  const text = await answer("fit", "searching settings: up to a minute ...");
  if (!text) return;
  const found = JSON.parse(text);
  const rows = found.rows.map((row) => {
    const line = document.createElement("tr");
    const take = element("button", "take");
    take.type = "button";
    take.addEventListener("click", () => {
      form.elements.settings.value = row.settings;
      estimate();
    });
    const cell = document.createElement("td");
    cell.append(take);
    line.append(cell, ...row.facts.map((fact) => element("td", fact.value)), element("td", row.settings, "settings"));
    return line;
  });
  if (rows.length) {
    const names = ["", ...found.rows[0].facts.map((fact) => fact.name), "settings"];
    document.querySelector("#found thead tr").replaceChildren(...names.map((name) => element("th", name)));
    say(`${rows.length} settings fit, by estimate`, "good");
  } else {
    say(`nothing fits; what would help: ${found.helps.join("; ")}`, "bad");
  }
  document.querySelector("#found tbody").replaceChildren(...rows);
  document.getElementById("found").hidden = rows.length === 0;
}

async function compile() {
  const text = await answer("plan", `${estimated}; compiling, up to a minute for large models ...`);
  if (!text) return;
  document.getElementById("plan").hidden = false;
  document.querySelector("#plan iframe").srcdoc = text;
  say("compiled: the plan is below", "good");
}

async function watch(section) {
  const response = await fetch(`run?number=${section.dataset.number}`).catch(() => null);
  if (response === null) return;
  const text = await response.text();
  section.querySelector("p").textContent = isRefusal(response) ? text : "";
  const frame = section.querySelector("iframe");
  if (!isRefusal(response) && frame.srcdoc !== text) frame.srcdoc = text;
}

function later(event) {
  const isModel = event.target.name === "model"; // which may be asked for on the hub: not with each letter of its name
  if (isModel !== (event.type === "change")) return;
  asked++;
  clearTimeout(timer);
  timer = setTimeout(estimate, PAUSE_MS);
}

form.addEventListener("input", later);
form.addEventListener("change", later);
form.addEventListener("submit", (event) => event.preventDefault());
document.getElementById("fit").addEventListener("click", fit);
document.getElementById("compile").addEventListener("click", compile);
document.getElementById("copy").addEventListener("click", () => {
  navigator.clipboard.writeText(document.getElementById("commands").textContent.split("\n")[0]);
});
for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
  if (form.elements[name]) form.elements[name].value = value;
}
for (const section of document.querySelectorAll(".run")) {
  watch(section);
  setInterval(watch, WATCH_MS, section);
}
estimate();
