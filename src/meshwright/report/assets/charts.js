/* Memory over time, and everything that is sent. */
MW.area = (line) => {
  const plan = MW.plan(), roles = Object.keys(line.roles), width = 1120, height = 260, left = 62, bottom = 24, top = 8;
  const total = line.at.map((_, i) => roles.reduce((sum, role) => sum + line.roles[role][i], 0));
  const most = Math.max(...total, plan.memory.limit && plan.memory.limit < 1.6 * Math.max(...total) ? plan.memory.limit : 0) * 1.04 || 1;
  const x = (i) => left + (width - left - 4) * line.at[i] / Math.max(1, line.num_ops - 1), y = (v) => top + (height - top - bottom) * (1 - v / most);
  const out = MW.svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": `memory over ${line.num_ops} operations, at most ${MW.bytes(Math.max(...total))}` });
  for (let i = 0; i <= 4; i += 1) {
    const v = most * i / 4;
    out.append(MW.svg("line", { class: "grid", x1: left, x2: width, y1: y(v), y2: y(v) }), MW.svg("text", { x: left - 8, y: y(v) + 4, "text-anchor": "end" }, document.createTextNode(MW.bytes(v))));
  }
  let base = total.map(() => 0);
  const colours = { parameters: 0, optimizer: 1, data: 2, gradients: 3, activations: 4, temporaries: 5, copies: 6 };
  for (const role of roles) {
    const high = base.map((b, i) => b + line.roles[role][i]);
    const path = high.map((v, i) => `${i ? "L" : "M"}${x(i).toFixed(1)},${y(v).toFixed(1)}`).join("") + base.map((_, i) => { const j = base.length - 1 - i; return `L${x(j).toFixed(1)},${y(base[j]).toFixed(1)}`; }).join("") + "Z";
    out.append(MW.svg("path", { d: path, fill: `var(--r${colours[role]})`, opacity: .85 }));
    base = high;
  }
  let phase = "";
  line.phase.forEach((name, i) => {
    if (name === phase) return;
    phase = name;
    out.append(MW.svg("line", { class: "grid", x1: x(i), x2: x(i), y1: top, y2: height - bottom }), MW.svg("text", { x: x(i) + 4, y: height - 8 }, document.createTextNode(name)));
  });
  if (plan.memory.limit && plan.memory.limit <= most) out.append(MW.svg("line", { class: "limit", x1: left, x2: width, y1: y(plan.memory.limit), y2: y(plan.memory.limit) }));
  const cursor = MW.svg("line", { class: "cursor", y1: top, y2: height - bottom, x1: -9, x2: -9 }), words = MW.el("div", { class: "legend", "aria-live": "polite" });
  const say = (i) => words.replaceChildren(...MW.legend(roles.map((role) => ({ name: role, colour: `var(--r${colours[role]})`, text: MW.bytes(line.roles[role][i]) }))).childNodes, MW.el("span", {}, `operation ${line.at[i]} (${line.phase[i]}) `, MW.el("b", {}, MW.bytes(total[i]))));
  out.append(cursor);
  out.addEventListener("pointermove", (event) => {
    const box = out.getBoundingClientRect(), op = ((event.clientX - box.left) / box.width * width - left) / (width - left - 4) * line.num_ops;
    let near = 0;
    line.at.forEach((at, i) => { if (Math.abs(at - op) < Math.abs(line.at[near] - op)) near = i; });
    cursor.setAttribute("x1", x(near));
    cursor.setAttribute("x2", x(near));
    say(near);
  });
  say(total.indexOf(Math.max(...total)));
  return MW.el("div", { class: "card" }, out, words);
};
MW.section("memory", "Memory over time", "Bytes on one device at every operation of the step; move over it to read it off.", (body) => body.append(MW.area(MW.plan().programs[0].timeline)), () => MW.plan().programs.some((p) => p.timeline));

MW.section("communication", "Communication", "Everything that is sent, with the source line that it is sent for. Click a heading to sort.", (body) => {
  const plan = MW.plan(), staged = plan.stages.length > 0, kinds = {}, sums = plan.stages.map(() => 0);
  if (staged) for (const c of plan.collectives) sums[c.stage] += c.seconds;
  const most = staged ? sums.indexOf(Math.max(...sums)) : null;
  for (const c of plan.collectives) if (c.stage === most) kinds[c.kind] = (kinds[c.kind] || 0) + c.seconds;
  const parts = Object.entries(kinds).sort((a, b) => b[1] - a[1]).map(([name, size], i) => ({ name, size, colour: `var(--r${(i + 3) % 7})`, text: `${MW.cost(size)}, ${MW.percent(size, plan.cost.total)} of the step` }));
  if (!parts.length) { body.append(MW.el("p", {}, "Nothing is sent.")); return; }
  if (staged) body.append(MW.el("p", { class: "lead" }, `Stage ${most} sends for longest:`));
  body.append(MW.el("div", { class: "card" }, MW.bar(parts), MW.legend(parts)), MW.table([
    ...(staged ? [{ key: "stage", name: "stage", num: true }] : []), { key: "kind", name: "kind" }, { key: "axes", name: "axes", show: (c) => MW.el("span", {}, c.axes.split("+").filter(Boolean).map((a, i) => MW.el("span", {}, i ? "+" : "", MW.el("span", { class: `axis-${a}` }, a)))) },
    { key: "phase", name: "phase" }, { key: "purpose", name: "for" }, { key: "operation", name: "operation" },
    { key: "number", name: "number", num: true, show: (c) => c.number.toLocaleString("en") }, { key: "bytes", name: "bytes", num: true, show: (c) => MW.bytes(c.bytes) },
    { key: "seconds", name: "time", num: true, show: (c) => `${MW.cost(c.seconds)}` }, { key: "source", name: "source", show: (c) => MW.el("code", { title: c.source }, c.source.split("/").slice(-2).join("/")) },
  ], plan.collectives, { search: "kind, operation or source", sorted: "seconds", class: "collectives" }));
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
