/* The verdict, the figures, where time goes, the mesh views that were solved. */
MW.bar = (parts) => {
  const total = parts.reduce((sum, part) => sum + part.size, 0) || 1;
  return MW.el("div", { class: "bar", role: "img", "aria-label": parts.map((p) => `${p.name} ${(100 * p.size / total).toFixed(0)}%`).join(", ") },
    parts.map((part) => { const i = MW.el("i", { title: part.name }); i.style.cssText = `width:${100 * part.size / total}%;background:${part.colour}`; return i; }));
};
MW.verdict = (plan) => {
  const out = MW.el("span");
  plan.verdict.forEach((part, i) => {
    if (i) out.append(", ");
    const words = part.text.split(/\b/);
    out.append(...words.map((word) => (part.axes.includes(word) ? MW.el("span", { class: `axis-${word}` }, word) : word)));
  });
  return out;
};
/* The subject of the page: model, batch, sequence, cluster, day. */
MW.about = (plan) => {
  const a = plan.about, count = (n) => n.toLocaleString("en");
  const facts = [a.model, a.batch && `batch ${count(a.batch)}`, a.sequence && `sequence ${count(a.sequence)}`, `${a.cluster} (${count(a.devices)} device${a.devices > 1 ? "s" : ""})`, MW.data.date];
  return MW.el("p", { class: "about" }, facts.filter(Boolean).map((fact, i) => MW.el("span", {}, i === 0 && a.model ? MW.el("b", {}, fact) : fact)));
};
/* How fast it trains, as it was simulated; nothing where the mesh is abstract. */
MW.speed = (plan, named) => {
  const s = plan.speed, card = (label, id, figure, notes) => MW.el("div", { class: "card" }, MW.el("div", { class: "label" }, label), MW.el("div", { class: "figure", id: named && id }, figure), notes.filter(Boolean).map((text) => MW.el("p", { class: "note" }, text)));
  if (!s) return [];
  const mfu = s.mfu ? `MFU ${(100 * s.mfu).toFixed(1)}%, ${MW.digits(s.tflops)} TFLOP/s a device` : null;
  const rate = s.rate ? [card("throughput, simulated", "rate", `${s.rate >= 1e3 ? Math.round(s.rate).toLocaleString("en") : MW.digits(s.rate)} ${s.unit}/s`, [mfu])] : [];
  const slower = s.step / plan.cost.total - 1, against = `${(100 * Math.abs(slower)).toFixed(0)}% ${slower < 0 ? "less" : "more"} than the cost: collectives overlap compute, and kernels and links keep less than their full rate`;
  return [...rate, card("one step, as planned", "simulated", MW.cost(s.step, plan), [s.rate ? null : mfu, s.bubble === null ? null : `bubble ${(100 * s.bubble).toFixed(1)}%`, against])];
};
/* The figures of a plan in cards; named for the plan that is chosen, whole where mesh and bound are shown, too. */
MW.figures = (plan, named = true, whole = true) => {
  const c = plan.cost, m = plan.memory;
  const time = [{ name: "compute", size: c.compute, colour: "var(--compute)", text: MW.cost(c.compute, plan) }, { name: "communication", size: c.communication, colour: "var(--send)", text: MW.cost(c.communication, plan) }];
  const held = Object.entries(m.arguments).filter(([, size]) => size).map(([name, size], i) => ({ name, size, colour: `var(--r${i})`, text: MW.bytes(size) }));
  const rest = { name: "temporaries", size: Math.max(0, m.peak - held.reduce((s, h) => s + h.size, 0)), colour: "var(--r4)" };
  rest.text = MW.bytes(rest.size);
  const free = m.limit ? [{ name: "free", size: Math.max(0, m.limit - m.peak), colour: "transparent", text: MW.bytes(Math.max(0, m.limit - m.peak)) }] : [];
  const out = MW.el("div", { class: "cards" },
    MW.el("div", { class: "card" }, MW.el("div", { class: "label" }, plan.speed ? "cost in the solver: compute, then communication" : "one step, as planned"), MW.el("div", { class: "figure", id: named && "step" }, MW.cost(c.total, plan)), MW.bar(time), MW.legend(time)),
    MW.speed(plan, named),
    MW.el("div", { class: "card" }, MW.el("div", { class: "label" }, m.limit ? `memory of a device, of ${MW.bytes(m.limit)} allowed` : "memory of a device"), MW.el("div", { class: "figure", id: named && "peak" }, MW.bytes(m.peak)), MW.bar([...held, rest, ...free]), MW.legend([...held, rest])));
  if (whole) out.append(
    MW.el("div", { class: "card" }, MW.el("div", { class: "label" }, "mesh"), MW.el("div", { class: "figure" }, plan.stages.length ? plan.mesh.axes : plan.mesh.names.map((name, i) => MW.el("span", {}, i ? " × " : "", MW.el("span", { class: `axis-${name}` }, name), `=${plan.mesh.sizes[i]}`))), MW.el("div", { class: "legend" }, (plan.mesh.names.length ? plan.links : []).map((link, i) => MW.el("span", {}, MW.el("span", { class: `axis-${plan.mesh.names[i]}` }, plan.mesh.names[i]), ` ${link}`))), plan.abstract ? null : MW.el("p", { class: "note" }, MW.machines(plan))),
    MW.el("div", { class: "card" }, MW.el("div", { class: "label" }, "how sure"), MW.el("div", { class: "figure" }, plan.solution.status), MW.el("p", { class: "note" }, `${plan.solution.text}; ${plan.provenance.costs || ""}`)));
  out.dataset.count = out.children.length;
  return out;
};
/* The machines behind a mesh, such as 2x8 h100-sxm-80gb. */
MW.machines = (plan) => plan.mesh.text.replace(/^.*?\((Cluster\(.*': )?/, "").replace(/\)+$/, "");
MW.section("overview", "Overview", null, (body) => {
  const plan = MW.plan();
  body.append(MW.about(plan), MW.el("h1", { id: "sentence" }, plan.sentence), MW.el("p", { class: "lead" }, MW.el("span", { id: "verdict" }, MW.verdict(plan)), `; ${plan.method} on mesh ${plan.mesh.axes}`));
  if (!MW.data.difference) body.append(MW.figures(plan)); // two plans have theirs side by side
  if (plan.unsplittable.length) body.append(MW.el("p", { class: "note" }, `planned without a rule, so not split: ${plan.unsplittable.join(", ")}`));
  for (const remark of plan.remarks) body.append(MW.el("p", { class: "note" }, remark));
});
MW.section("decisions", "Decisions", "What the search decided about the whole step, each beside the quickest plan that decides it otherwise.", (body) => {
  const plan = MW.plan(), instead = { step: "", more: null, peak: null };
  const figures = [
    { key: "step", name: "step", num: true, show: (c) => (c.step === null ? "does not fit" : c.step === "" ? "" : MW.cost(c.step)) },
    { key: "more", name: "difference", num: true, show: (c) => (c.more === null ? "" : `${c.more < 0 ? "−" : "+"}${(100 * Math.abs(c.more)).toFixed(1)}%`) },
    { key: "peak", name: "memory", num: true, show: (c) => (c.peak === null ? "" : `${c.step === null ? "≥ " : ""}${MW.bytes(c.peak)}`) },
  ];
  const decided = plan.decided.map((d) => ({ ...d, ...instead, plan: d.without, ...d.instead }));
  body.append(MW.table([{ key: "name", name: "decision" }, { key: "taken", name: "taken" }, { key: "plan", name: "instead", wide: true }, ...figures], decided));
  body.append(MW.el("h3", {}, "Other plans that were looked into"), MW.table([{ key: "plan", name: "plan", wide: true }, ...figures], plan.compared));
}, () => MW.plan().compared.length > 0);
MW.section("views", "Mesh views", "Other logical views of the same devices, and the best plans found on them.", (body) => {
  const plan = MW.plan();
  body.append(MW.table([
    { key: "mesh", name: "mesh" }, { key: "cost", name: "cost", num: true, show: (v) => MW.cost(v.cost) },
    { key: "peak", name: "memory", num: true, show: (v) => (v.peak ? MW.bytes(v.peak) : "") }, { key: "remark", name: "remark", show: (v) => (v.mesh === plan.mesh.sizes.join("×") ? "chosen" : v.remark) },
  ], plan.considered));
}, () => MW.plan().considered.length > 1);
