/* A simulated or recorded step: the compute and communication of each class of devices over time. Zooms with buttons, keys and Ctrl + wheel; drags. */
MW.workColours = { forward: "var(--x)", backward: "var(--y)", weights: "var(--z)", update: "var(--r1)" };
MW.laneColours = { exposed: "var(--bad)", collectives: "var(--send)", fetches: "var(--r2)", gradients: "var(--gradients)", transfers: "var(--r5)" };
MW.timeline = (line, room) => {
  const left = 92, right = 8, span = line.ticks, width = room, view = { from: 0, to: span }, out = MW.svg("svg", { width, class: "chart timeline", role: "img", tabindex: "0" });
  const heights = (lane) => (lane.name === "compute" ? 24 : 12), x = (t) => left + (width - left - right) * (t - view.from) / (view.to - view.from);
  const clip = MW.svg("clipPath", { id: `${line.kind}-clip` }, MW.svg("rect", { x: left, y: 0, width: width - left - right, height: 1e5 }));
  const bar = (lane, [start, stop, name, work, count], y, high) => {
    const kind = line.work[work], long = x(stop) - x(start), w = Math.max(.5, long > 4 ? long - .6 : long), seconds = (t) => MW.cost(t * line.step / span);
    const node = MW.svg("rect", { x: x(start), y, width: w, height: high, rx: Math.min(2, w / 3), class: lane.name === "compute" ? `step ${kind}` : "sent", fill: lane.name === "compute" ? MW.workColours[kind] : MW.laneColours[lane.name] });
    node.append(MW.svg("title", {}, document.createTextNode(`${kind}: ${line.names[name]}${count > 1 ? ` and ${count - 1} more` : ""}\n${seconds(start)} to ${seconds(stop)}, ${seconds(stop - start)}`)));
    const number = /^microbatch (\d+)/.exec(line.names[name]);
    return number && lane.name === "compute" && count === 1 && w > 6 + 7 * number[1].length ? [node, MW.words(number[1], { x: x(start) + w / 2, y: y + 16, "text-anchor": "middle", class: "inside" })] : [node];
  };
  const draw = () => {
    const bars = MW.svg("g", { "clip-path": `url(#${line.kind}-clip)` }), texts = MW.svg("g");
    let y = 4;
    for (const row of line.rows) {
      for (const lane of row.lanes) {
        const high = heights(lane);
        texts.append(MW.words(lane.name === "compute" ? (line.rows.length > 1 ? row.name : "compute") : lane.name, { x: 0, y: y + high / 2 + 4, class: lane.name === "compute" ? "lane" : "lane small" }), MW.svg("rect", { x: left, y, width: width - left - right, height: high, rx: 3, fill: "var(--hover)" }));
        for (const item of lane.bars) if (item[1] >= view.from && item[0] <= view.to) bars.append(...bar(lane, item, y, high));
        y += high + 3;
      }
      y += 6;
    }
    const axis = MW.svg("g"), seconds = line.step / span, begin = view.from * seconds, size = (view.to - view.from) * seconds, [scale, unit] = MW.timeUnits().find(([s]) => view.to * seconds >= s) || [1e-9, "ns"];
    const steps = MW.round(size / scale, width < 600 ? 3 : 8), step = steps[1] || 1, first = Math.ceil(begin / scale / step - 1e-9);
    for (let i = first; i * step * scale <= (begin + size) * 1.000001; i += 1) {
      const at = x(i * step * scale / seconds), text = Number((i * step).toPrecision(9)).toLocaleString("en", { maximumFractionDigits: 9 });
      axis.append(MW.svg("line", { class: "grid", x1: at, x2: at, y1: 0, y2: y }), MW.words(i ? `${text} ${unit}` : "0", { class: "tick", x: at, y: y + 14, "text-anchor": at > width - 40 ? "end" : "middle" }));
    }
    out.setAttribute("height", y + 20);
    out.setAttribute("viewBox", `0 0 ${width} ${y + 20}`);
    out.setAttribute("aria-label", `${line.kind} step of ${MW.cost(line.step)}, shown from ${MW.cost(begin)} to ${MW.cost(begin + size)}`);
    out.dataset.zoom = (span / (view.to - view.from)).toFixed(2);
    out.replaceChildren(clip, texts, axis, bars);
  };
  const move = (from, size) => {
    const wanted = Math.min(span, Math.max(span / 4000, size));
    view.from = Math.min(Math.max(0, from), span - wanted);
    view.to = view.from + wanted;
    draw();
  };
  const zoom = (factor, at = (view.from + view.to) / 2) => { const size = (view.to - view.from) / factor; move(at - (at - view.from) / factor, size); };
  const place = (event) => { const box = out.getBoundingClientRect(); return view.from + (view.to - view.from) * Math.min(1, Math.max(0, ((event.clientX - box.left) * width / box.width - left) / (width - left - right))); };
  out.addEventListener("wheel", (event) => { if (!event.ctrlKey && !event.metaKey) return; event.preventDefault(); zoom(event.deltaY < 0 ? 1.4 : 1 / 1.4, place(event)); }, { passive: false });
  out.addEventListener("dblclick", (event) => zoom(3, place(event)));
  let held = null;
  out.addEventListener("pointerdown", (event) => { held = { x: event.clientX, from: view.from }; out.setPointerCapture(event.pointerId); });
  out.addEventListener("pointermove", (event) => { if (held) move(held.from - (event.clientX - held.x) / (width - left - right) * (view.to - view.from), view.to - view.from); });
  for (const end of ["pointerup", "pointercancel"]) out.addEventListener(end, () => { held = null; });
  out.addEventListener("keydown", (event) => {
    const size = view.to - view.from, does = { "+": () => zoom(2), "=": () => zoom(2), "-": () => zoom(.5), 0: () => move(0, span), ArrowLeft: () => move(view.from - size / 5, size), ArrowRight: () => move(view.from + size / 5, size) }[event.key];
    if (!does) return;
    event.preventDefault();
    event.stopPropagation();
    does();
  });
  draw();
  const button = (text, label, does) => MW.el("button", { type: "button", "aria-label": label, title: label, onclick: does }, text);
  const buttons = MW.el("div", { class: "row zoom" }, button("+", "Zoom in", () => zoom(2)), button("−", "Zoom out", () => zoom(.5)), button("◂", "Earlier", () => move(view.from - (view.to - view.from) / 2, view.to - view.from)), button("▸", "Later", () => move(view.from + (view.to - view.from) / 2, view.to - view.from)), button("whole step", "Show the whole step", () => move(0, span)));
  const works = new Set(), lanes = new Set();
  for (const row of line.rows) for (const lane of row.lanes) { if (lane.name === "compute") lane.bars.forEach((b) => works.add(line.work[b[3]])); else lanes.add(lane.name); }
  const said = { exposed: "(communication that compute waits for)", collectives: "(before what needs them)", fetches: "(weights, beside compute)", gradients: "(beside compute)", transfers: "(to other stages)" };
  const parts = [...line.work.filter((w) => works.has(w)).map((name) => ({ name, colour: MW.workColours[name], text: "" })), ...[...lanes].map((name) => ({ name: `${name} ${said[name]}`, colour: MW.laneColours[name], text: "" }))];
  return MW.el("div", { class: "card" }, buttons, MW.el("div", { class: "tall" }, out), MW.legend(parts));
};
MW.section("timeline", "Timeline", "One simulated step: compute and communication of each class of devices. Drag to move, Ctrl + wheel or the buttons to zoom; hover over a bar to read it.", (body) => {
  const { timeline, recorded } = MW.plan();
  body.append(MW.timeline(timeline, MW.room(body)));
  if (recorded) body.append(MW.el("h3", {}, `The same step as it ran: ${MW.cost(recorded.step)}, simulated ${MW.cost(timeline.step)}`), MW.timeline(recorded, MW.room(body)));
}, () => Boolean(MW.plan().timeline));
