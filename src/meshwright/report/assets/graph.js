/* The operations of a layer as a graph: groups that are split together, red where something is sent. */
MW.layout = (graph) => {
  const depth = graph.nodes.map(() => 0), into = graph.nodes.map(() => []);
  for (const edge of graph.edges) if (edge.from < edge.to) into[edge.to].push(edge.from);
  graph.nodes.forEach((_, i) => { depth[i] = into[i].length ? Math.max(...into[i].map((j) => depth[j])) + 1 : 0; });
  const rows = [];
  depth.forEach((d, i) => { (rows[d] = rows[d] || []).push(i); });
  const place = [];
  for (const row of rows) {
    const centre = (i) => (into[i].length ? into[i].reduce((s, j) => s + place[j].x, 0) / into[i].length : i);
    row.sort((a, b) => centre(a) - centre(b));
    row.forEach((i, n) => { place[i] = { x: n - (row.length - 1) / 2, row: depth[i] }; });
  }
  return { place, rows };
};
MW.drawGraph = (graph, detail) => {
  const { place, rows } = MW.layout(graph), width = 268, height = 62, gapX = 24, gapY = 54;
  const most = Math.max(...rows.map((row) => row.length));
  const wide = Math.max(most * (width + gapX) + 120, 420), high = rows.length * (height + gapY) + 10;
  const out = MW.svg("svg", { width: wide, height: high, viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": `${graph.nodes.length} groups of operations` });
  const at = (i) => ({ x: wide / 2 + place[i].x * (width + gapX) - width / 2, y: place[i].row * (height + gapY) + 6 });
  const edges = MW.svg("g"), texts = MW.svg("g"), nodes = MW.svg("g");
  graph.edges.forEach((edge, n) => {
    const a = at(edge.from), b = at(edge.to), x1 = a.x + width / 2, y1 = a.y + height, x2 = b.x + width / 2, y2 = b.y;
    const sends = edge.sent.length > 0, near = place[edge.to].row - place[edge.from].row <= 1, bend = Math.max(20, (y2 - y1) / 2);
    // What skips a row goes round by the side of it, so that it does not hide behind other boxes.
    const side = Math.max(x1, x2) + width / 2 + 16 + (n % 4) * 9, middle = (y1 + y2) / 2;
    const path = near ? `M${x1},${y1} C${x1},${y1 + bend} ${x2},${y2 - bend} ${x2},${y2}` : `M${x1},${y1} C${x1},${y1 + 30} ${side},${y1 + 10} ${side},${middle} S${x2},${y2 - 30} ${x2},${y2}`;
    edges.append(MW.svg("path", { class: `gedge${sends ? " sends" : ""}`, d: path }));
    if (sends) texts.append(MW.svg("text", { class: "gtext", x: near ? (x1 + x2) / 2 + 6 : side + 5, y: near ? y2 - 22 : middle }, document.createTextNode(edge.sent.join(", "))));
  });
  const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  graph.nodes.forEach((node, i) => {
    const { x, y } = at(i), weight = Object.keys(node.reads).map((path) => path.split("/").pop()).join(", ");
    const g = MW.svg("g", { class: `gnode${node.sent.length ? " sends" : ""}`, transform: `translate(${x},${y})`, tabindex: "0", role: "button", "aria-label": node.label, onclick: () => detail(node), onkeydown: (e) => { if (e.key === "Enter") detail(node); } });
    g.append(MW.svg("title", {}, document.createTextNode(`${node.label}\n${node.notation}\n${node.source}`)), MW.svg("rect", { width, height, rx: 8 }),
      MW.svg("text", { x: 11, y: 19 }, weight ? MW.svg("tspan", { "font-weight": 650 }, document.createTextNode(`${cut(weight, 16)}  `)) : [], document.createTextNode(cut(node.label.replace(/\/dot_general$/, ""), weight ? 30 : 38))),
      MW.svg("text", { class: "sub", x: 11, y: 37 }, document.createTextNode(cut(node.notation.replace(/ \(summed.*\)/, ""), 36))),
      MW.svg("text", { class: node.sent.length ? "sent" : "sub", x: 11, y: 54 }, document.createTextNode(cut(node.sent.join(", ") || `${node.num_ops} operation${node.num_ops > 1 ? "s" : ""}`, 40))));
    nodes.append(g);
  });
  out.append(edges, nodes, texts);
  return out;
};
MW.graphs = () => MW.plan().programs.flatMap((p) => p.layers.map((g) => (p.name ? { ...g, name: `${p.name}: ${g.name}` } : g)));
MW.section("layer", "A layer", "Operations that share one choice, and what flows between them. Red is communication.", (body) => {
  const graphs = MW.graphs(), picture = MW.el("div", { class: "card graph" }), facts = MW.el("div");
  const detail = (node) => facts.replaceChildren(MW.el("div", { class: "card" }, MW.el("b", {}, node.label), ` (${node.phase}, ${node.num_ops} operations)`, MW.el("p", {}, MW.symbols(node.notation)),
    MW.el("p", { class: "note" }, node.source), ...Object.entries(node.reads).map(([path, sent]) => MW.el("p", { class: "note" }, `reads ${path}${sent.length ? `, after ${sent.join(", ")}` : " as it lies"}`))));
  const choose = MW.el("select", { "aria-label": "Which layer", onchange: (e) => show(Number(e.target.value)) }, graphs.map((g, i) => MW.el("option", { value: i }, g.name)));
  const show = (i) => {
    facts.replaceChildren();
    picture.replaceChildren(MW.drawGraph(graphs[i], detail));
    if (graphs[i].left) picture.append(MW.el("p", { class: "note" }, `${graphs[i].left} more groups are not drawn.`));
    picture.scrollLeft = (picture.scrollWidth - picture.clientWidth) / 2;
  };
  body.append(MW.el("div", { class: "row" }, choose), picture, facts);
  show(0);
}, () => MW.graphs().length > 0);
