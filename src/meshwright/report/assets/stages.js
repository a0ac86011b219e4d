/* Stages and the pipeline's timeline. */
MW.section("stages", "Stages", "The pipeline: which layers are where, and what each stage does when, one step of it.", (body) => {
  const plan = MW.plan(), p = plan.pipeline;
  body.append(MW.el("p", { class: "lead" }, `schedule ${p.schedule}, ${p.num_microbatches} microbatches, interleave ${p.interleave}, checkpoint ${p.checkpoint}`));
  body.append(MW.pipeline(plan.bars));
  const rows = plan.stages.map((s, i) => ({ ...s, number: i, span: `${s.layers[0]}–${s.layers[1] - 1}` }));
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
