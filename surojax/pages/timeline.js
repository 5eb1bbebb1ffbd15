"use strict";
(() => {
  // events: [row, kind, name, loop, begin, duration, megabytes], times in microseconds, in order of their beginning
  const { rows, kinds, names, loops, events } = JSON.parse(document.getElementById("events").textContent);
  const canvas = document.getElementById("timeline");
  const said = document.getElementById("event");
  const ROW = 34, AXIS = 24, LABEL = 14;
  const end = events.reduce((most, e) => Math.max(most, e[4] + e[5]), 0);
  const inRow = rows.map((_, row) => events.filter((e) => e[0] === row));
  let from = 0, to = end, row = 0, chosen = null, width = 0;

  const time = (us) => (us >= 1e6 ? `${(us / 1e6).toFixed(3)} s` : us >= 1e3 ? `${(us / 1e3).toFixed(3)} ms` : `${us.toFixed(2)} us`);
  const x = (us) => ((us - from) / (to - from)) * width;

  function draw() {
    const scale = window.devicePixelRatio || 1;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    const height = AXIS + rows.length * (ROW + LABEL);
    width = canvas.clientWidth;
    canvas.width = width * scale;
    canvas.height = height * scale;
    canvas.style.height = `${height}px`;
    const c = canvas.getContext("2d");
    c.scale(scale, scale);
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    const unit = 10 ** Math.floor(Math.log10((to - from) / 3));
    const step = [5, 2, 1].map((n) => n * unit).find((n) => (to - from) / n >= 3) || unit;
    c.fillStyle = colour("--faint");
    c.strokeStyle = colour("--line");
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
      c.beginPath();
      c.moveTo(x(t), AXIS);
      c.lineTo(x(t), height);
      c.stroke();
      c.textAlign = x(t) < 30 ? "left" : x(t) > width - 40 ? "right" : "center";
      c.fillText(time(t), x(t), AXIS / 2);
    }
    c.textAlign = "left";
    rows.forEach((name, r) => {
      const top = AXIS + r * (ROW + LABEL);
      c.fillStyle = colour(r === row && document.activeElement === canvas ? "--text" : "--faint");
      c.fillText(name, 2, top + LABEL / 2);
    });
    const drawn = new Float64Array(rows.length).fill(-1); // the pixel up to which a row is drawn
    const fills = kinds.map((_, kind) => colour(`--c${kind % 10}`));
    for (const e of events) {
      const left = x(e[4]), right = x(e[4] + e[5]);
      if (right < 0 || left > width || right < drawn[e[0]]) continue;
      const w = Math.max(right - left, 1);
      const top = AXIS + e[0] * (ROW + LABEL) + LABEL;
      c.fillStyle = fills[e[1]];
      c.fillRect(left, top, w > 3 ? w - 0.5 : w, ROW - 4);
      drawn[e[0]] = left + w - 0.5;
      if (w > 48) {
        c.save();
        c.beginPath();
        c.rect(Math.max(left, 0), top, Math.min(right, width) - Math.max(left, 0) - 3, ROW);
        c.clip();
        c.fillStyle = colour("--card");
        c.fillText(names[e[2]], Math.max(left, 0) + 4, top + ROW / 2 - 2);
        c.restore();
      }
    }
    if (chosen) {
      c.strokeStyle = colour("--text");
      c.lineWidth = 2;
      c.strokeRect(x(chosen[4]), AXIS + chosen[0] * (ROW + LABEL) + LABEL, Math.max(x(chosen[4] + chosen[5]) - x(chosen[4]), 2), ROW - 4);
    }
  }

  function choose(e) {
    chosen = e;
    const size = e && e[6] ? `, ${e[6]} MB` : "";
    said.textContent = e ? `${rows[e[0]]}: ${names[e[2]]} (${kinds[e[1]]}, ${loops[e[3]]}), ${time(e[5])} from ${time(e[4])}${size}` : "";
    draw();
  }

  function show(begin, span) {
    span = Math.min(Math.max(span, 0.1), end);
    from = Math.min(Math.max(begin, 0), end - span);
    to = from + span;
    draw();
  }

  function zoom(factor, at) {
    show(at - (at - from) * factor, (to - from) * factor);
  }

  function stepTo(direction) {
    const all = inRow[row];
    let i = all.indexOf(chosen);
    if (i < 0) i = all.findIndex((e) => e[4] + e[5] >= from) - (direction > 0 ? 1 : 0);
    const e = all[Math.min(Math.max(i + direction, 0), all.length - 1)];
    if (e[4] < from || e[4] + e[5] > to) show(e[4] + e[5] / 2 - (to - from) / 2, to - from);
    choose(e);
  }

  const middle = () => (chosen && chosen[4] >= from && chosen[4] <= to ? chosen[4] + chosen[5] / 2 : (from + to) / 2);
  const keys = {
    "+": () => zoom(0.6, middle()),
    "=": () => zoom(0.6, middle()),
    "-": () => zoom(1 / 0.6, middle()),
    0: () => show(0, end),
    Home: () => show(0, to - from),
    End: () => show(end, to - from),
    ArrowLeft: () => show(from - (to - from) / 5, to - from),
    ArrowRight: () => show(from + (to - from) / 5, to - from),
    ArrowUp: () => { row = Math.max(row - 1, 0); choose(null); said.textContent = rows[row]; },
    ArrowDown: () => { row = Math.min(row + 1, rows.length - 1); choose(null); said.textContent = rows[row]; },
    "<": () => stepTo(-1),
    ",": () => stepTo(-1),
    ">": () => stepTo(1),
    ".": () => stepTo(1),
  };
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  document.querySelectorAll("[data-key]").forEach((button) => button.addEventListener("click", () => keys[button.dataset.key]()));
  const at = (event) => from + ((event.clientX - canvas.getBoundingClientRect().left) / width) * (to - from);
  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoom(Math.exp(event.deltaY / 400), at(event));
  }, { passive: false });
  let dragged = null;
  canvas.addEventListener("pointerdown", (event) => {
    dragged = { at: event.clientX, from };
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", () => { dragged = null; });
  canvas.addEventListener("pointercancel", () => { dragged = null; });
  canvas.addEventListener("pointermove", (event) => {
    if (dragged) {
      show(dragged.from - ((event.clientX - dragged.at) / width) * (to - from), to - from);
      return;
    }
    const pointed = Math.floor((event.clientY - canvas.getBoundingClientRect().top - AXIS) / (ROW + LABEL));
    if (!inRow[pointed]) return;
    row = pointed;
    const t = at(event), near = (2 * (to - from)) / width;
    const hit = inRow[pointed].find((e) => e[4] - near <= t && t <= e[4] + e[5] + near);
    if (hit !== chosen) choose(hit || null);
  });
  canvas.addEventListener("focus", draw);
  canvas.addEventListener("blur", draw);
  draw();
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
