/* Stages and the pipeline's timeline. */
MW.section("stages", "Stages", "The pipeline: which layers are where, and what each stage does when, one step of it.", (body) => {
  const plan = MW.plan(), p = plan.pipeline;
  body.append(MW.el("p", { class: "lead" }, `schedule ${p.schedule}, ${p.num_microbatches} microbatches, interleave ${p.interleave}, checkpoint ${p.checkpoint}`));
  body.append(MW.pipeline(plan.bars));
  const rows = plan.stages.map((s, i) => ({ ...s, number: i, span: s.layers }));
  body.append(MW.el("p"), MW.table([
    { key: "number", name: "stage", num: true }, { key: "span", name: "layers" }, { key: "devices", name: "devices" }, { key: "mesh", name: "mesh" }, { key: "verdict", name: "verdict" },
    { key: "microbatch_s", name: "a microbatch", num: true, show: (s) => MW.cost(s.microbatch_s) }, { key: "once_s", name: "once a step", num: true, show: (s) => MW.cost(s.once_s) },
    { key: "state", name: "state", num: true, show: (s) => MW.bytes(s.state) }, { key: "peak", name: "peak", num: true, show: (s) => MW.bytes(s.peak) },
  ], rows, { class: "stages" }));
}, () => MW.plan().stages.length > 0);
MW.pipeline = (bars) => {
  const end = Math.max(...bars.flat().map((b) => b.stop), 1e-12), width = 1120, row = 30, left = 62, high = bars.length * (row + 6) + 24;
  const out = MW.svg("svg", { viewBox: `0 0 ${width} ${high}`, class: "chart pipeline", role: "img", "aria-label": `timeline of ${bars.length} stages` });
  const colour = { forward: "var(--x)", backward: "var(--y)", weights: "var(--z)" }, x = (t) => left + (width - left - 6) * t / end;
  bars.forEach((steps, s) => {
    const y = s * (row + 6) + 2;
    out.append(MW.svg("text", { x: 0, y: y + 19 }, document.createTextNode(`stage ${s}`)), MW.svg("rect", { x: left, y, width: width - left - 6, height: row, rx: 4, fill: "var(--hover)" }));
    for (const step of steps) {
      const w = Math.max(.6, x(step.stop) - x(step.start) - .6);
      const bar = MW.svg("rect", { x: x(step.start), y: y + 2, width: w, height: row - 4, rx: 2, fill: colour[step.work], opacity: .85, class: "step" });
      bar.append(MW.svg("title", {}, document.createTextNode(`${step.work} of microbatch ${step.microbatch}: ${MW.cost(step.start)} to ${MW.cost(step.stop)}`)));
      out.append(bar);
      if (w > 15) out.append(MW.svg("text", { x: x(step.start) + w / 2, y: y + 19, "text-anchor": "middle", style: "fill:#fff;pointer-events:none" }, document.createTextNode(String(step.microbatch))));
    }
  });
  out.append(MW.svg("text", { x: left, y: high - 6 }, document.createTextNode("0")), MW.svg("text", { x: width - 6, y: high - 6, "text-anchor": "end" }, document.createTextNode(MW.cost(end))));
  const legend = ["forward", "backward", "weights"].filter((work) => bars.flat().some((b) => b.work === work)).map((name) => ({ name, colour: colour[name], text: "" }));
  return MW.el("div", { class: "card" }, out, MW.legend(legend));
};
MW.section("stage-memory", "Memory of stages", "Bytes on a device of a stage over one simulated step.", (body) => {
  const plan = MW.plan(), series = plan.memory_series, end = Math.max(...plan.bars.flat().map((b) => b.stop), 1e-12), holder = MW.el("div");
  const fullest = plan.stages.reduce((best, s, i) => (s.peak > plan.stages[best].peak ? i : best), 0);
  const show = (i) => holder.replaceChildren(MW.steps(series[i], end, `memory of stage ${i}`));
  const choose = MW.el("select", { "aria-label": "Which stage", onchange: (e) => show(Number(e.target.value)) }, series.map((_, i) => MW.el("option", { value: i }, `stage ${i}, at most ${MW.bytes(Math.max(...series[i].map((m) => m[1])))}`)));
  choose.value = String(fullest);
  body.append(MW.el("div", { class: "row" }, choose), holder);
  show(fullest);
}, () => MW.plan().stages.length > 0);
/* What holds from each moment to the next. */
MW.steps = (series, end, label) => {
  const width = 1120, height = 220, left = 62, bottom = 24, most = Math.max(...series.map((m) => m[1])) * 1.05 || 1;
  const x = (t) => left + (width - left - 6) * Math.min(1, t / end), y = (v) => 8 + (height - 8 - bottom) * (1 - v / most);
  const out = MW.svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": label });
  for (let i = 0; i <= 4; i += 1) out.append(MW.svg("line", { class: "grid", x1: left, x2: width, y1: y(most * i / 4), y2: y(most * i / 4) }), MW.svg("text", { x: left - 8, y: y(most * i / 4) + 4, "text-anchor": "end" }, document.createTextNode(MW.bytes(most * i / 4))));
  const path = series.map(([t, v], i) => `${i ? `L${x(t).toFixed(1)},${y(series[i - 1][1]).toFixed(1)}L` : "M"}${x(t).toFixed(1)},${y(v).toFixed(1)}`).join("");
  out.append(MW.svg("path", { d: `${path}L${x(end)},${y(series[series.length - 1][1]).toFixed(1)}L${x(end)},${y(0)}L${x(series[0][0])},${y(0)}Z`, fill: "var(--r4)", opacity: .85 }));
  out.append(MW.svg("text", { x: left, y: height - 6 }, document.createTextNode("0")), MW.svg("text", { x: width - 6, y: height - 6, "text-anchor": "end" }, document.createTextNode(MW.cost(end))));
  return MW.el("div", { class: "card" }, out);
};
