// Shows the estimates of docs/plans.py, which are in this page. The choices are also the part of the address behind "#".
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const form = document.getElementById("choices");
const said = document.getElementById("said");
let taken = ""; // settings of the row that was taken; "": the fastest that fits

// The cases of so many GPUs, in the order of their estimates: how state is shared, and where it rests.
function cases(gpus) {
  const shared = gpus === 1 ? data.sharing.slice(0, 1) : data.sharing;
  return shared.flatMap((sharing) => data.placements.map((placement) => ({ sharing, placement })));
}

function gib(mib) {
  return `${(mib / 1024).toLocaleString("en", { minimumFractionDigits: 1, maximumFractionDigits: 1 })} GiB`;
}

function figure(number) {
  return number.toLocaleString("en", { maximumSignificantDigits: 3 });
}

// Every case of a machine, with its figures, and whether they fit.
function rows(model, gpu, gpus) {
  const host = Number(form.elements.host.value) * 1024 * data.host_pool || Infinity;
  const start = data.counts.slice(0, data.counts.indexOf(gpus)).reduce((sum, number) => sum + cases(number).length, 0);
  return cases(gpus).flatMap(({ sharing, placement }, number) => {
    const estimate = data.models[model].estimates[gpu][start + number];
    if (estimate === null) return []; // refused
    const [device, inHost, files, milliseconds] = estimate;
    const settings = [data.models[model].settings, gpus === 1 ? "" : sharing.settings, placement.settings];
    const allowed = files === 0 || form.elements.files.value;
    return [{
      name: gpus === 1 ? placement.name : `${sharing.name}, ${placement.name}`,
      settings: settings.filter((text) => text).join(" "),
      device, inHost, files, milliseconds,
      tokens: (1e3 * gpus * data.models[model].tokens) / milliseconds,
      problem: !allowed ? "files may not be used" : device > data.gpus[gpu].limit ? `lacks ${gib(device - data.gpus[gpu].limit)} of each GPU`
        : inHost > host ? `lacks ${gib(inHost - host)} of host memory` : "",
    }];
  });
}

function fastest(found) {
  return found.filter((row) => !row.problem).reduce((best, row) => (best && best.tokens >= row.tokens ? best : row), null);
}

function chosen() {
  return [form.elements.model.value, form.elements.gpu.value, Number(form.elements.gpus.value)];
}

function taking(text, onClick) {
  const cell = document.createElement("td");
  cell.append(button(text, onClick));
  return cell;
}

function fill(id, names, lines) {
  const table = document.getElementById(id);
  table.querySelector("thead tr").replaceChildren(...names.map((name) => element("th", name)));
  table.querySelector("tbody").replaceChildren(...lines);
}

function placements(found, best) {
  const lines = found.map((row) => {
    const line = document.createElement("tr");
    const take = taking("show", () => {
      taken = row.settings;
      draw();
      const again = document.querySelector(`#placements tr[data-settings="${row.settings}"] button`);
      again.focus({ preventScroll: true }); // the table is a new one
    });
    line.dataset.settings = row.settings;
    const verdict = row.problem ? row.problem : row === best ? "fits, fastest" : "fits";
    const figures = [gib(row.device), gib(row.inHost), row.files ? gib(row.files) : "-", `${figure(row.milliseconds / 1e3)} s`];
    line.append(take, element("td", row.name, "settings"), element("td", verdict, row.problem ? "bad" : "good"));
    line.append(...figures.map((text) => element("td", text)), element("td", figure(row.tokens)));
    return line;
  });
  fill("placements", ["details", "where", "by estimate", "each GPU", "host of a machine", "files", "a step", "tokens/s"], lines);
}

function machines(model) {
  const lines = Object.entries(data.gpus).map(([gpu, { name }]) => {
    const line = document.createElement("tr");
    line.append(element("td", name));
    for (const gpus of data.counts) {
      const best = fastest(rows(model, gpu, gpus));
      line.append(best === null ? element("td", "-") : taking(figure(best.tokens), () => {
        form.elements.gpu.value = gpu;
        form.elements.gpus.value = gpus;
        taken = "";
        draw();
        form.elements.gpus.focus();
      }));
    }
    return line;
  });
  fill("machines", ["GPU", ...data.counts.map((gpus) => `${gpus} GPU${gpus === 1 ? "" : "s"}`)], lines);
}

function draw() {
  const [model, gpu, gpus] = chosen();
  const found = rows(model, gpu, gpus);
  const best = fastest(found);
  const row = found.find(({ settings }) => settings === taken) || best;
  const fits = row !== null && !row.problem;
  said.textContent = row === null ? "None of these placements fits; those that come near are below"
    : row.problem ? `It does not fit, by estimate: ${row.problem}` : `It fits, by estimate: ${row.name}`;
  said.className = `verdict ${fits ? "good" : "bad"}`;
  show(row === null ? [] : [
    { name: "memory of each GPU", value: gib(row.device), exact: row.device, note: `of ${gib(data.gpus[gpu].limit)}` },
    { name: "host memory of a machine", value: gib(row.inHost), exact: row.inHost, note: "" },
    { name: "files", value: gib(row.files), exact: row.files, note: "per machine" },
    { name: "a step", value: `${figure(row.milliseconds)} ms`, exact: row.milliseconds, note: "estimated" },
    { name: "tokens/s", value: figure(row.tokens), exact: row.tokens, note: `${figure(row.tokens / gpus)} per GPU` },
  ]);
  const words = row === null ? [] : row.settings.split(" ").filter((word) => word).map((word) => `--config.${word}`);
  const machine = [["--host-memory", form.elements.host.value]].flatMap(([name, value]) => (value ? [name, value] : []));
  const command = ["--config", model, `--config.gpus=${gpus}`, ...words];
  showCommands(row === null ? [`surojax fit --config ${model} --gpu ${gpu} --config.gpus=${gpus}`]
    : [["surojax plan", ...command, "--gpu", gpu, ...machine].join(" "), ["surojax train", ...command].join(" ")]);
  placements(found, best);
  machines(model);
  const filled = [...new FormData(form)].filter(([, value]) => value !== "");
  history.replaceState(null, "", `#${new URLSearchParams([...filled, ...(taken ? [["settings", taken]] : [])])}`);
}

form.addEventListener("input", () => {
  taken = "";
  draw();
});
form.addEventListener("submit", (event) => event.preventDefault());
for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
  if (name === "settings") taken = value;
  else if (form.elements[name]) form.elements[name].value = value;
}
draw();
