// Draws one step on a time line. A pixel has each kind's share of its time as height, so that what is painted of a kind
// is its share of the row; events that are wide enough have their names, and are described under the pointer.
"use strict";
(async () => {
  const packed = Uint8Array.from(atob(document.getElementById("events").textContent.trim()), (c) => c.charCodeAt(0));
  const json = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  // columns of events: row, kind, name, loop, begin after the event before, duration, megabytes; times in 10 ns
  const { rows, kinds, names, loops, columns } = await new Response(json).json();
  let now = 0;
  const events = columns[0].map((row, i) => ({
    row, kind: columns[1][i], name: names[columns[2][i]], loop: loops[columns[3][i]],
    begin: (now += columns[4][i]) / 100, end: (now + columns[5][i]) / 100, megabytes: columns[6][i],
  }));
  const canvas = document.getElementById("timeline");
  const said = document.getElementById("event");
  const BAR = 30, AXIS = 24, LABEL = 14, ROW = BAR + 4 + LABEL;
  const LEAST = 2; // pixels of an event that is described by itself
  const end = events.reduce((most, e) => Math.max(most, e.end), 0);
  const inRow = rows.map((_, row) => events.filter((e) => e.row === row));
  let from = 0, to = end, row = 0, chosen = null, width = 0;

  const time = (us) => (us >= 1e6 ? `${(us / 1e6).toFixed(3)} s` : us >= 1e3 ? `${(us / 1e3).toFixed(3)} ms` : `${us.toFixed(2)} us`);
  const x = (us) => ((us - from) / (to - from)) * width;
  const top = (r) => AXIS + r * ROW + LABEL;

  // [kind][pixel]: the share of each of so many pixels that a row's events take
  function shares(row, pixels) {
    const found = kinds.map(() => new Float64Array(pixels));
    const scale = pixels / (to - from);
    for (const e of inRow[row]) {
      const left = Math.max((e.begin - from) * scale, 0), right = Math.min((e.end - from) * scale, pixels);
      for (let pixel = Math.floor(left); pixel < right; pixel++) {
        found[e.kind][pixel] += Math.min(right, pixel + 1) - Math.max(left, pixel);
      }
    }
    return found;
  }

  function draw() {
    const scale = window.devicePixelRatio || 1;
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(name).trim();
    width = canvas.clientWidth;
    const height = AXIS + rows.length * ROW;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(height * scale);
    canvas.style.height = `${height}px`;
    const c = canvas.getContext("2d");
    const bar = Math.round(BAR * scale);
    rows.forEach((_, r) => {
      c.fillStyle = colour("--page");
      c.fillRect(0, Math.round(top(r) * scale), canvas.width, bar);
      const free = new Int32Array(canvas.width).fill(bar); // height of each pixel that is not painted yet
      shares(r, canvas.width).forEach((share, kind) => {
        c.fillStyle = colour(`--c${kind % 10}`);
        let due = 0; // what rounding to whole pixels has left to the pixels behind
        share.forEach((part, pixel) => {
          due += part * bar;
          const painted = Math.min(Math.round(due), free[pixel]);
          if (painted <= 0) return;
          due -= painted;
          free[pixel] -= painted;
          c.fillRect(pixel, Math.round(top(r) * scale) + free[pixel], 1, painted);
        });
      });
    });
    c.scale(scale, scale);
    c.font = "11px system-ui, sans-serif";
    c.textBaseline = "middle";
    const unit = 10 ** Math.floor(Math.log10((to - from) / 3));
    const step = [5, 2, 1].map((n) => n * unit).find((n) => (to - from) / n >= 3) || unit;
    c.fillStyle = colour("--faint");
    for (let t = Math.ceil(from / step) * step; t <= to; t += step) {
      c.fillRect(x(t), AXIS - 6, 1, 6);
      c.textAlign = x(t) < 30 ? "left" : x(t) > width - 40 ? "right" : "center";
      c.fillText(time(t), x(t), AXIS / 2 - 2);
    }
    c.textAlign = "left";
    rows.forEach((name, r) => {
      c.fillStyle = colour(r === row && document.activeElement === canvas ? "--text" : "--faint");
      c.fillText(name, 2, top(r) - LABEL / 2);
      c.fillStyle = colour("--card");
      for (const e of inRow[r]) {
        const left = Math.max(x(e.begin), 0), room = Math.min(x(e.end), width) - left - 8;
        if (room < 40) continue;
        const shown = Math.floor(room / 6);
        c.fillText(e.name.length > shown ? `${e.name.slice(0, shown - 1)}…` : e.name, left + 4, top(r) + BAR / 2);
      }
    });
    if (chosen) {
      c.strokeStyle = colour("--text");
      c.lineWidth = 2;
      c.strokeRect(x(chosen.begin), top(chosen.row), Math.max(x(chosen.end) - x(chosen.begin), 2), BAR);
    }
  }

  function choose(e) {
    chosen = e;
    const size = e && e.megabytes ? `, ${e.megabytes} MB` : "";
    said.textContent = e ? `${rows[e.row]}: ${e.name} (${kinds[e.kind]}, ${e.loop}), ${time(e.end - e.begin)} from ${time(e.begin)}${size}` : rows[row];
    draw();
  }

  // Chooses the event of the row at a time; if several are in that pixel, says their shares of it.
  function point(t) {
    const pixel = (to - from) / width;
    const near = inRow[row].filter((e) => e.begin < t + pixel && t - pixel < e.end);
    const hit = near.find((e) => near.length === 1 || e.end - e.begin > LEAST * pixel) || null;
    if (hit !== chosen) choose(hit);
    if (hit) return;
    const here = shares(row, Math.ceil(width)).map((share) => share[Math.floor(x(t))]);
    const parts = kinds.flatMap((kind, i) => (here[i] > 0.0005 ? [`${kind} ${(100 * here[i]).toFixed(1)} %`] : []));
    said.textContent = `${rows[row]} at ${time(t)}: ${parts.join(", ") || "nothing"}`;
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
    if (!all.length) return;
    let i = all.indexOf(chosen);
    if (i < 0) i = all.findIndex((e) => e.end >= from) - (direction > 0 ? 1 : 0);
    const e = all[Math.min(Math.max(i + direction, 0), all.length - 1)];
    if (e.begin < from || e.end > to) show((e.begin + e.end - (to - from)) / 2, to - from);
    choose(e);
  }

  function chooseRow(number) {
    row = Math.min(Math.max(number, 0), rows.length - 1);
    choose(null);
  }

  const middle = () => (chosen && chosen.begin >= from && chosen.begin <= to ? (chosen.begin + chosen.end) / 2 : (from + to) / 2);
  const keys = {
    "+": () => zoom(0.6, middle()),
    "-": () => zoom(1 / 0.6, middle()),
    0: () => show(0, end),
    Home: () => show(0, to - from),
    End: () => show(end, to - from),
    ArrowLeft: () => show(from - (to - from) / 5, to - from),
    ArrowRight: () => show(from + (to - from) / 5, to - from),
    ArrowUp: () => chooseRow(row - 1),
    ArrowDown: () => chooseRow(row + 1),
    "<": () => stepTo(-1),
    ">": () => stepTo(1),
  };
  Object.assign(keys, { "=": keys["+"], ",": keys["<"], ".": keys[">"] });
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
  document.querySelectorAll("[data-key]").forEach((button) => button.addEventListener("click", () => keys[button.dataset.key]()));
  const at = (event) => from + ((event.clientX - canvas.getBoundingClientRect().left) / width) * (to - from);
  canvas.addEventListener("wheel", (event) => {
    if (document.activeElement !== canvas && !event.ctrlKey) return; // the page scrolls
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
    const pointed = Math.floor((event.clientY - canvas.getBoundingClientRect().top - AXIS) / ROW);
    if (!inRow[pointed]) return;
    row = pointed;
    point(at(event));
  });
  canvas.addEventListener("focus", draw);
  canvas.addEventListener("blur", draw);
  draw();
  addEventListener("resize", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
})();
