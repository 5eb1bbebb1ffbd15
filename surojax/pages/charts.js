// Draws the curves of runs.py by uPlot, which shows values in the legend, enlarges what is dragged over, and hides curves.
"use strict";
(() => {
  // charts: [{title, unit, curves: [{name, colour, marks, points: [steps, values]}], plan}]; resumed: [{step, name}]
  const { charts, resumed, plan_colour } = JSON.parse(document.getElementById("curves").textContent);
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const HEIGHT = 260;
  const text = (plot, value) => (value == null ? "-" : value.toLocaleString("en", { maximumSignificantDigits: 6 }));

  function resumeMarks(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.strokeStyle = colour("--faint");
    ctx.setLineDash([4, 4]);
    for (const { step } of resumed) {
      const x = plot.valToPos(step, "x", true);
      if (x < bbox.left || x > bbox.left + bbox.width) continue;
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.restore();
  }

  function draw(element, chart) {
    const data = uPlot.join(chart.curves.map((curve) => curve.points), chart.curves.map(() => [1]));
    const series = chart.curves.map((curve) => ({
      label: curve.name,
      stroke: () => colour(`--c${curve.colour}`),
      width: 1.5,
      value: text,
      ...(curve.marks ? { dash: [6, 4], points: { show: true, size: 7, fill: () => colour(`--c${curve.colour}`) } } : {}),
    }));
    if (chart.plan !== null) {
      data.push(data[0].map(() => chart.plan));
      series.push({ label: "plan", stroke: () => colour(`--c${plan_colour}`), dash: [10, 5], value: text, points: { show: false } });
    }
    const axis = { stroke: () => colour("--faint"), grid: { stroke: () => colour("--line"), width: 1 }, ticks: { show: false } };
    const width = () => Math.max(element.clientWidth, 200);
    const plot = new uPlot({
      width: width(),
      height: HEIGHT,
      scales: { x: { time: false } },
      series: [{ label: "step", value: text }, ...series],
      axes: [{ ...axis, label: "step", labelSize: 20, size: 34 }, { ...axis, label: chart.unit || chart.title, labelSize: 20, size: 64, values: (_, ticks) => ticks.map((x) => text(_, x)) }],
      cursor: { sync: { key: "step", scales: ["x", null] }, hover: { prox: 30 }, focus: { prox: 24 } },
      hooks: { draw: [resumeMarks] },
    }, data, element);
    element.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      if (!move) return;
      event.preventDefault();
      const to = Math.min(Math.max((plot.cursor.idx ?? -1) + move, 0), data[0].length - 1);
      plot.setCursor({ left: plot.valToPos(data[0][to], "x"), top: HEIGHT / 3 }, true, true);
    });
    new ResizeObserver(() => plot.setSize({ width: width(), height: HEIGHT })).observe(element);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => plot.redraw(false, false));
  }

  for (const element of document.querySelectorAll(".chart")) draw(element, charts[element.dataset.number]);
})();
