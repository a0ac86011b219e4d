/* Two plans side by side, and their differences. */
MW.section("difference", "Difference", "Both plans side by side, and every tensor that is split differently.", (body) => {
  const [one, other] = MW.data.plans, d = MW.data.difference;
  if (d.problems.length) body.append(MW.el("p", { class: "lead", id: "problems" }, `The plans are for different problems: ${d.problems[0]}${d.problems.length > 1 ? `; ${d.problems.length - 1} more arguments differ` : ""}.`));
  const change = other.cost.total - one.cost.total;
  body.append(MW.el("p", { class: "lead", id: "change" }, d.same ? "The plans are the same." : `${MW.data.names[1]} takes ${d.step[1]} a step, ${MW.signed(change, one)} (${MW.percent(change, one.cost.total)}) against ${d.step[0]} of ${MW.data.names[0]}.`));
  body.append(MW.el("div", { class: "two" }, [one, other].map((plan, i) => MW.el("div", { class: "card" }, MW.el("div", { class: "label" }, MW.data.names[i]), MW.el("h3", {}, plan.sentence), MW.el("p", { class: "note" }, MW.verdict(plan), `; ${plan.method} on mesh ${plan.mesh.axes} (${MW.machines(plan)})`), MW.figures(plan, MW.data.plans[MW.which] === plan, false)))));
  const side = (row) => (row ? MW.el("span", { style: "display:flex;gap:8px;align-items:center" }, MW.picture(row), MW.symbols(row.symbols), MW.el("span", { class: "tag" }, row.kind)) : "not there");
  if (d.moved.length) body.append(MW.table([
    { key: "path", name: "tensor", show: (m) => MW.el("span", {}, m.path, m.count > 1 ? MW.el("span", { class: "count" }, `  ×${m.count}${m.which ? `: ${m.which}` : ""}`) : null) },
    { key: "first", name: MW.data.names[0], show: (m) => side(m.one) }, { key: "second", name: MW.data.names[1], show: (m) => side(m.other) },
  ], d.moved.map((m) => ({ ...m, first: m.one ? m.one.symbols : "", second: m.other ? m.other.symbols : "" })), { search: "tensor or sharding", class: "moved" }));
  if (d.sent.length) body.append(MW.el("h3", {}, "Communication that differs"), MW.table([
    { key: "kind", name: "kind" }, { key: "axes", name: "axes" }, { key: "phase", name: "phase" },
    { key: "a", name: `${MW.data.names[0]}`, num: true, show: (s) => `${MW.bytes(s.bytes[0])}, ${MW.cost(s.seconds[0], one)}` }, { key: "b", name: `${MW.data.names[1]}`, num: true, show: (s) => `${MW.bytes(s.bytes[1])}, ${MW.cost(s.seconds[1], other)}` },
    { key: "change", name: "time", num: true, show: (s) => MW.signed(s.change, one) },
  ], d.sent.map((s) => ({ ...s, a: s.seconds[0], b: s.seconds[1], change: s.seconds[1] - s.seconds[0] })), { sorted: "change" }));
}, () => Boolean(MW.data.difference));
