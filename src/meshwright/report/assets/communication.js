/* All collectives and all operations. */
MW.section("communication", "Communication", "Everything that is sent, the longest first, with the source line that it is sent for. Click a heading to sort.", (body) => {
  const plan = MW.plan(), staged = plan.stages.length > 0, kinds = {}, sums = plan.stages.map(() => 0);
  if (staged) for (const c of plan.collectives) sums[c.stage] += c.seconds;
  const most = staged ? sums.indexOf(Math.max(...sums)) : null;
  for (const c of plan.collectives) if (c.stage === most) kinds[c.kind] = (kinds[c.kind] || 0) + c.seconds;
  const parts = Object.entries(kinds).sort((a, b) => b[1] - a[1]).map(([name, size], i) => ({ name, size, colour: `var(--r${(i + 3) % 7})`, text: `${MW.cost(size)}, ${MW.percent(size, plan.cost.total)} of the step` }));
  if (!parts.length) { body.append(MW.el("p", {}, "Nothing is sent.")); return; }
  if (staged) body.append(MW.el("p", { class: "lead" }, `Stage ${most} sends for longest:`));
  body.append(MW.el("div", { class: "card" }, MW.bar(parts), MW.legend(parts)), MW.table([
    ...(staged ? [{ key: "stage", name: "stage", num: true }] : []), { key: "kind", name: "kind", fixed: true }, { key: "axes", name: "axes", fixed: true, show: (c) => MW.el("span", {}, c.axes.split("+").filter(Boolean).map((a, i) => MW.el("span", {}, i ? "+" : "", MW.el("span", { class: `axis-${a}` }, a)))) },
    { key: "phase", name: "phase", fixed: true }, { key: "purpose", name: "for", fixed: true }, { key: "operation", name: "operation", cut: true, show: (c) => MW.el("span", { title: c.operation }, c.operation) },
    { key: "number", name: "number", num: true, show: (c) => c.number.toLocaleString("en") }, { key: "bytes", name: "bytes", num: true, show: (c) => MW.bytes(c.bytes) },
    { key: "seconds", name: "time", num: true, show: (c) => `${MW.cost(c.seconds)}` }, { key: "source", name: "source", cut: true, show: (c) => MW.el("code", { title: c.source }, c.source.split("/").slice(-2).join("/")) },
  ], plan.collectives, { search: "kind, operation or source", sorted: "seconds", class: "collectives", most: 8 }));
}, () => MW.plan().collectives.length > 0 || !MW.plan().stages.length);
MW.section("operations", "Operations", "The program as it was traced, each operation with the shardings that were chosen.", (body) => {
  const programs = MW.plan().programs, holder = MW.el("div");
  const show = (i) => holder.replaceChildren(...MW.operations(programs[i].operations));
  const choose = MW.el("select", { "aria-label": "Which stages", onchange: (e) => show(Number(e.target.value)) }, programs.map((p, i) => MW.el("option", { value: i }, p.name)));
  if (programs.length > 1) body.append(MW.el("div", { class: "row" }, choose));
  body.append(holder);
  show(0);
}, () => MW.plan().programs.length > 0);
MW.operations = (ops) => {
  const n = ops.label.length, count = MW.el("span", { class: "label" }, `${n.toLocaleString("en")} operations`);
  const line = (i) => MW.el("div", { class: "line", role: "listitem" }, MW.el("span", { class: "label" }, String(i)), MW.el("span", { class: "label" }, ops.phases[ops.phase[i]]), MW.el("span", { title: ops.labels[ops.label[i]] }, ops.labels[ops.label[i]]), MW.symbols(ops.notations[ops.notation[i]]), MW.el("code", { class: "label", title: ops.sources[ops.source[i]] }, ops.sources[ops.source[i]].split("/").slice(-2).join("/")));
  const list = MW.list(n, line);
  const text = (i) => `${ops.phases[ops.phase[i]]} ${ops.labels[ops.label[i]]} ${ops.notations[ops.notation[i]]} ${ops.sources[ops.source[i]]}`.toLowerCase();
  let waiting = 0;
  const search = MW.el("input", { type: "search", placeholder: "label, sharding or source", "aria-label": "Search operations", oninput: (event) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => {
      const words = event.target.value.toLowerCase().split(/\s+/).filter(Boolean), found = [];
      for (let i = 0; i < n; i += 1) if (words.every((word) => text(i).includes(word))) found.push(i);
      count.textContent = words.length ? `${found.length.toLocaleString("en")} of ${n.toLocaleString("en")} operations` : `${n.toLocaleString("en")} operations`;
      list.show(words.length ? found : null);
    }, 120);
  } });
  return [MW.el("div", { class: "row" }, search, count), MW.el("div", { class: "card flush" }, list)];
};
