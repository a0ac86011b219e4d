/* Stages of a pipeline: each one's description, how full its devices are, and their memory over a simulated step. */
MW.section("stages", "Stages", "The pipeline: which layers are where, and how much of its devices' memory each stage needs.", (body) => {
  const plan = MW.plan(), p = plan.pipeline;
  body.append(MW.el("p", { class: "lead" }, `schedule ${p.schedule}, ${p.num_microbatches} microbatches, interleave ${p.interleave}, checkpoint ${p.checkpoint}`));
  const idle = plan.stages.flatMap((s, i) => (s.idle >= 0.5 ? [`stage ${i} ${(100 * s.idle).toFixed(0)}%`] : []));
  if (idle.length) body.append(MW.el("p", { class: "warning", id: "idle" }, `Stages wait at least half of the simulated step: ${idle.join(", ")}. More microbatches, or layers cut otherwise, would keep them busy.`));
  const rows = plan.stages.map((s, i) => ({ ...s, number: i, span: s.layers }));
  body.append(MW.table([
    { key: "number", name: "stage", num: true }, { key: "span", name: "layers" }, { key: "devices", name: "devices", fixed: true }, { key: "mesh", name: "mesh", fixed: true }, { key: "verdict", name: "verdict", wide: true },
    { key: "microbatch_s", name: "a microbatch", num: true, show: (s) => MW.cost(s.microbatch_s) }, { key: "once_s", name: "once a step", num: true, show: (s) => MW.cost(s.once_s) },
    { key: "idle", name: "waits", num: true, show: (s) => `${(100 * s.idle).toFixed(0)}%` }, { key: "state", name: "state", num: true, show: (s) => MW.bytes(s.state) }, { key: "peak", name: "memory, of its limit", num: true, show: MW.full },
  ], rows, { class: "stages" }));
}, () => MW.plan().stages.length > 0);
/* A stage's memory as a bar that is as long as its limit. */
MW.full = (stage) => {
  const peak = MW.bytes(stage.peak);
  if (!stage.limit) return peak;
  const fill = MW.el("i"), part = stage.peak / stage.limit;
  fill.style.cssText = `width:${Math.min(100, 100 * part)}%;background:var(${part > 1 ? "--bad" : "--r4"})`;
  return MW.el("div", { class: "full" }, MW.el("span", {}, `${peak} of ${MW.bytes(stage.limit)}`), MW.el("div", { class: "bar", role: "img", "aria-label": `${(100 * part).toFixed(0)}% of the limit` }, fill));
};
MW.section("stage-memory", "Memory of stages", "Bytes on a device of a stage over one simulated step.", (body) => {
  const plan = MW.plan(), series = plan.memory_series, end = plan.timeline ? plan.timeline.step : 1e-12, holder = MW.el("div");
  const fullest = plan.stages.reduce((best, s, i) => (s.peak > plan.stages[best].peak ? i : best), 0);
  const show = (i) => holder.replaceChildren(MW.steps(series[i], end, `memory of stage ${i}`, plan.stages[i].limit, MW.room(body)));
  const choose = MW.el("select", { "aria-label": "Which stage", onchange: (e) => show(Number(e.target.value)) }, series.map((_, i) => MW.el("option", { value: i }, `stage ${i}, at most ${MW.bytes(Math.max(...series[i].map((m) => m[1])))}`)));
  choose.value = String(fullest);
  body.append(MW.el("div", { class: "row" }, choose), holder);
  show(fullest);
}, () => MW.plan().stages.length > 0);
/* A step curve: each value holds until the next moment. */
MW.steps = (series, end, label, limit, width) => {
  const height = 230, left = 66, right = width - 8, top = 18, bottom = 24, most = MW.top(Math.max(...series.map((m) => m[1])), limit);
  const x = (t) => left + (right - left) * Math.min(1, t / end), y = (v) => top + (height - top - bottom) * (1 - v / most);
  const out = MW.svg("svg", { width, viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": label });
  MW.byteAxis(out, most, { left, right, y });
  const path = series.map(([t, v], i) => `${i ? `L${x(t).toFixed(1)},${y(series[i - 1][1]).toFixed(1)}L` : "M"}${x(t).toFixed(1)},${y(v).toFixed(1)}`).join("");
  out.append(MW.svg("path", { d: `${path}L${x(end)},${y(series[series.length - 1][1]).toFixed(1)}L${x(end)},${y(0)}L${x(series[0][0])},${y(0)}Z`, fill: "var(--r4)", opacity: .85 }));
  MW.limitLine(out, limit, most, { left, right, top, y });
  for (const tick of MW.ticks(end, MW.timeUnits(), width < 600 ? 3 : 8)) out.append(MW.words(tick.text, { class: "tick", x: x(tick.value), y: height - 6, "text-anchor": x(tick.value) > right - 30 ? "end" : "middle" }));
  return MW.el("div", { class: "card" }, out);
};
