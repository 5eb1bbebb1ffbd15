// Asks the server of surojax/studio.py for what the form's choices need. What is shown answers the choices as they are:
// whatever changes them first removes it. The choices are also the part of the address behind "#".
"use strict";

const form = document.getElementById("choices");
const fields = JSON.parse(document.getElementById("of-fields").textContent); // {name: {kind, choices, default, help}}
const by = (id) => document.getElementById(id);
const PAUSE_MS = 300; // after the last key, before an estimate is asked for
const REST_MS = 1200; // after an estimate, before its plan is compiled
const WATCH_MS = 5000; // between looks at a run
const WORDS = { "--effective-batch": "sequences", "--config": "model", "--gpu": "gpu", "--disk": "disk", lora: "method", qlora_bnb: "method" };
let asked = 0; // the number of the last question; answers to earlier ones are dropped
let timer; // of the next question

function query() {
  return new URLSearchParams([...new FormData(form)].filter(([, value]) => value !== "")).toString();
}

function say(text, kind) {
  by("said").textContent = text;
  by("said").className = `verdict ${kind || ""}`;
}

// Removes the answer to the last question. keepsFound: but for the settings that were found.
function forget(text, keepsFound) {
  asked++;
  clearTimeout(timer);
  say(text);
  show([]);
  showCommands([]);
  by("note").textContent = "";
  by("uncompiled").hidden = by("plan").hidden = true;
  by("plan").querySelector("iframe").removeAttribute("srcdoc");
  if (!keepsFound) by("found").hidden = true;
  for (const error of form.querySelectorAll(".error")) error.remove();
  for (const control of form.querySelectorAll("[aria-invalid]")) control.removeAttribute("aria-invalid");
}

// Says why there is no answer: at the first control that the line names, or in place of the answer.
function refuse(line) {
  const names = (line.match(/[-\w.]+/g) || []).map((word) => word.replace(/^--config\.|[.:]$/g, ""));
  const named = (name) => form.elements[WORDS[name] || name] || form.elements[WORDS[`--${name}`]];
  const control = names.map((name) => (name === "model_path" && !form.elements.model_path.value ? form.elements.model : named(name))).find((found) => found && found.name);
  if (!control) return say(line, "bad");
  say("The marked field has to change first", "bad");
  control.setAttribute("aria-invalid", "true");
  const error = element("span", line.replace(/^[-\w.]+: /, ""), "error bad");
  error.setAttribute("role", "alert");
  control.closest("label").append(error);
}

// The answer to a question as JSON; null if there is none, or if another question was asked meanwhile.
async function answer(path) {
  const number = ++asked;
  const response = await fetch(`${path}?${query()}`).catch(() => null);
  const text = response && (await response.text());
  if (number !== asked) return null;
  if (response === null) say("surojax studio does not answer: has it ended?", "bad");
  else if (isRefusal(response)) refuse(text);
  else return JSON.parse(text);
  return null;
}

// Whether a response is a line that says why there is no answer.
function isRefusal(response) {
  return response.headers.get("Content-Type").startsWith("text/plain");
}

function showAnswer(found, isEstimate) {
  say(found.said, found.fits ? "good" : "bad");
  show(found.facts);
  by("facts").classList.toggle("estimated", isEstimate);
}

async function estimate() {
  history.replaceState(null, "", `#${query()}`);
  const found = await answer("estimate");
  if (!found) return;
  showAnswer(found, true);
  const phases = found.phases.map((phase) => `${phase.name} ${phase.seconds.toLocaleString("en", { maximumSignificantDigits: 3 })}`);
  by("note").textContent = `Estimated seconds by phase: ${phases.join(", ")}`;
  showCommands(found.fits ? [found.train, found.plan] : [found.fit, found.plan]);
  by("uncompiled").hidden = !found.compiles || found.fits;
  if (found.fits && found.compiles) timer = setTimeout(compile, REST_MS);
}

async function compile() {
  by("note").textContent = "These are estimates; the step is being compiled, which takes up to a minute for large models ...";
  by("uncompiled").hidden = true;
  const found = await answer("plan");
  if (!found) return;
  showAnswer(found, false);
  by("note").textContent = "Read from the compiled step; its details are below.";
  by("plan").hidden = false;
  by("plan").querySelector("iframe").srcdoc = found.page;
}

async function fit() {
  forget("searching settings: up to a minute ...");
  history.replaceState(null, "", `#${query()}`);
  const found = await answer("fit");
  if (!found) return;
  if (!found.rows.length) return say(`Nothing fits. What would help: ${found.helps.join("; ")}`, "bad");
  const rows = found.rows.map((row) => {
    const line = document.createElement("tr");
    const first = document.createElement("td");
    first.append(button("take", () => take(line, row.settings)));
    const words = row.settings.map(([name, value]) => `${name}=${value}`).join(" ");
    line.append(first, ...row.facts.map((fact) => element("td", fact.value)), element("td", words || "as they are", "settings"));
    return line;
  });
  const names = ["", ...found.rows[0].facts.map((fact) => fact.name), "settings"];
  by("found").querySelector("thead tr").replaceChildren(...names.map((name) => element("th", name)));
  by("found").querySelector("tbody").replaceChildren(...rows);
  by("found").hidden = false;
  take(rows[0], found.rows[0].settings);
}

function take(line, settings) {
  for (const other of by("found").querySelectorAll("tbody tr")) other.querySelector("button").setAttribute("aria-pressed", other === line);
  by("settings").replaceChildren();
  for (const [name, value] of settings) addSetting(name, value);
  forget("estimating ...", true);
  estimate();
}

// A control for a field, with its help, and a button that takes it away again.
function addSetting(name, value) {
  const field = fields[name];
  const label = element("label", `${name} `);
  const choices = field.choices.length ? field.choices : field.kind === "bool" ? ["true", "false"] : null;
  const control = document.createElement(choices ? "select" : "input");
  for (const choice of choices || []) control.append(new Option(choice));
  if (!choices && field.kind !== "str") control.inputMode = "decimal";
  if (choices && value && !choices.includes(value)) control.append(new Option(value));
  control.name = name;
  control.value = value || (choices ? choices.find((choice) => choice !== field.default) : "");
  control.placeholder = field.default;
  label.append(control, element("small", `${field.help}. Default: ${field.default}`));
  const remove = button("remove", () => {
    row.remove();
    ask();
  });
  remove.setAttribute("aria-label", `remove ${name}`);
  const row = document.createElement("div");
  row.append(label, remove);
  by("settings").append(row);
  return control;
}

function ask() {
  forget("estimating ...");
  timer = setTimeout(estimate, PAUSE_MS);
}

function chooseModel() {
  form.elements.model_path.closest("label").hidden = form.elements.model.value !== "";
  if (form.elements.model.value) form.elements.model_path.value = "";
}

form.addEventListener("input", (event) => {
  if (event.target.id === "add") return;
  if (event.target.name === "model_path") return forget("waiting for the model's name"); // not asked for with each letter of it
  if (event.target.name === "model") {
    chooseModel();
    if (!event.target.value) return forget("which model?");
  }
  ask();
});
form.elements.model_path.addEventListener("change", ask);
by("add").addEventListener("change", () => {
  const name = by("add").value.trim();
  if (!fields[name]) return;
  by("add").value = "";
  (form.elements[name] || addSetting(name)).focus();
  ask();
});
form.addEventListener("submit", (event) => event.preventDefault());
by("fit").addEventListener("click", fit);
by("compile").addEventListener("click", compile);
addEventListener("message", (event) => {
  for (const frame of document.querySelectorAll("iframe")) {
    if (frame.contentWindow === event.source) frame.style.height = `${Number(event.data.height)}px`;
  }
});

async function watch(section) {
  const frame = section.querySelector("iframe");
  if (frame.matches(":hover, :focus")) return; // somebody reads a value
  const response = await fetch(`run?number=${section.dataset.number}`).catch(() => null);
  if (response === null) return;
  const text = await response.text();
  section.querySelector("p").textContent = isRefusal(response) ? text : "";
  section.querySelector("p").hidden = !isRefusal(response);
  if (!isRefusal(response) && frame.srcdoc !== text) frame.srcdoc = text;
}

for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
  const control = form.elements[name] || (fields[name] && addSetting(name, value));
  if (control) control.value = value;
}
if (form.elements.model_path.value) form.elements.model.value = "";
chooseModel();
for (const section of document.querySelectorAll(".run")) {
  watch(section);
  setInterval(watch, WATCH_MS, section);
}
forget("estimating ...");
estimate();
