/* Memory over time of a plan that is one program. */
MW.area = (line, room) => {
  const plan = MW.plan(), roles = Object.keys(line.roles), width = room, height = 270, left = 66, right = width - 4, bottom = 24, top = 18;
  const total = line.at.map((_, i) => roles.reduce((sum, role) => sum + line.roles[role][i], 0));
  const most = MW.top(Math.max(...total), plan.memory.limit);
  const x = (i) => left + (right - left) * line.at[i] / Math.max(1, line.num_ops - 1), y = (v) => top + (height - top - bottom) * (1 - v / most);
  const out = MW.svg("svg", { width, viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": `memory over ${line.num_ops} operations, at most ${MW.bytes(Math.max(...total))}` });
  MW.byteAxis(out, most, { left, right, y });
  let base = total.map(() => 0);
  const colours = { parameters: 0, optimizer: 1, data: 2, gradients: 3, activations: 4, temporaries: 5, copies: 6 };
  for (const role of roles) {
    const high = base.map((b, i) => b + line.roles[role][i]);
    const path = high.map((v, i) => `${i ? "L" : "M"}${x(i).toFixed(1)},${y(v).toFixed(1)}`).join("") + base.map((_, i) => { const j = base.length - 1 - i; return `L${x(j).toFixed(1)},${y(base[j]).toFixed(1)}`; }).join("") + "Z";
    out.append(MW.svg("path", { d: path, fill: `var(--r${colours[role]})`, opacity: .85 }));
    base = high;
  }
  // Of a step in microbatches these are named, as far as there is room, and not the passes of each.
  const named = (i) => (line.num_parts === 1 || line.phase[i] === "update" ? line.phase[i] : `microbatch ${line.part[i]}`);
  let before = "", free = left;
  line.at.forEach((_, i) => {
    if (named(i) === before) return;
    before = named(i);
    out.append(MW.svg("line", { class: "grid", x1: x(i), x2: x(i), y1: top, y2: height - bottom }));
    if (x(i) < free) return;
    out.append(MW.words(before, { x: x(i) + 4, y: height - 8 }));
    free = x(i) + 10 + 7 * before.length;
  });
  MW.limitLine(out, plan.memory.limit, most, { left, right, top, y });
  const cursor = MW.svg("line", { class: "cursor", y1: top, y2: height - bottom, x1: -9, x2: -9 }), words = MW.el("div", { class: "legend", "aria-live": "polite" });
  const say = (i) => words.replaceChildren(...MW.legend(roles.map((role) => ({ name: role, colour: `var(--r${colours[role]})`, text: MW.bytes(line.roles[role][i]) }))).childNodes, MW.el("span", {}, `operation ${line.op[i]} (${line.phase[i]}${line.num_parts > 1 && line.phase[i] !== "update" ? ` of microbatch ${line.part[i]}` : ""}) `, MW.el("b", {}, MW.bytes(total[i]))));
  out.append(cursor);
  out.addEventListener("pointermove", (event) => {
    const box = out.getBoundingClientRect(), op = ((event.clientX - box.left) / box.width * width - left) / (right - left) * line.num_ops;
    let near = 0;
    line.at.forEach((at, i) => { if (Math.abs(at - op) < Math.abs(line.at[near] - op)) near = i; });
    cursor.setAttribute("x1", x(near));
    cursor.setAttribute("x2", x(near));
    say(near);
  });
  say(total.indexOf(Math.max(...total)));
  return MW.el("div", { class: "card" }, out, words);
};
MW.section("memory", "Memory over time", "Bytes on one device at every operation of the step, once for each microbatch; move over it to read it off.", (body) => body.append(MW.area(MW.plan().programs[0].timeline, MW.room(body))), () => MW.plan().programs.some((p) => p.timeline));
