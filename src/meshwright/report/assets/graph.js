/* The operations of a layer as a graph: groups that are split together, red where there is communication. */
MW.drawGraph = (graph, detail) => {
  const { boxes, chains, wide, high } = MW.layout(graph), { width, height } = MW.box;
  const out = MW.svg("svg", { width: wide, height: high, viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": `${graph.nodes.length} groups of operations` });
  const edges = MW.svg("g"), texts = MW.svg("g"), nodes = MW.svg("g");
  graph.edges.forEach((edge, n) => {
    const sends = edge.sent.length > 0, chain = chains[n], to = boxes[edge.to];
    edges.append(MW.svg("path", { class: `gedge${sends ? " sends" : ""}`, d: chain ? MW.route(chain) : MW.routeBack(boxes[edge.from], to, wide - 10 - (n % 4) * 5) }));
    if (!sends) return;
    const above = chain ? chain[chain.length - 2] : to;
    texts.append(MW.svg("text", { class: "gtext", x: (above.x + to.x) / 2 + 6, y: to.y - 22 }, document.createTextNode(edge.sent.join(", "))));
  });
  const cut = (text, most) => (text.length > most ? `${text.slice(0, most - 1)}…` : text);
  graph.nodes.forEach((node, i) => {
    const x = boxes[i].x - width / 2, { y } = boxes[i], weight = Object.keys(node.reads).map((path) => path.split("/").pop()).join(", ");
    const g = MW.svg("g", { class: `gnode${node.sent.length ? " sends" : ""}`, transform: `translate(${x},${y})`, tabindex: "0", role: "button", "aria-label": node.label, onclick: () => detail(node), onkeydown: (e) => { if (e.key === "Enter") detail(node); } });
    g.append(MW.svg("title", {}, document.createTextNode(`${node.label}\n${node.notation}\n${node.source}`)), MW.svg("rect", { width, height, rx: 8 }),
      MW.svg("text", { x: 11, y: 19 }, weight ? MW.svg("tspan", { "font-weight": 650 }, document.createTextNode(`${cut(weight, 16)}  `)) : [], document.createTextNode(cut(node.label.replace(/\/dot_general$/, ""), weight ? 36 - Math.min(16, weight.length) : 38))),
      MW.svg("text", { class: "sub", x: 11, y: 37 }, document.createTextNode(cut(node.notation.replace(/ \(summed.*\)/, ""), 36))),
      MW.svg("text", { class: node.sent.length ? "sent" : "sub", x: 11, y: 54 }, document.createTextNode(cut(node.sent.join(", ") || `${node.num_ops} operation${node.num_ops > 1 ? "s" : ""}`, 40))));
    nodes.append(g);
  });
  out.append(edges, nodes, texts);
  return out;
};
MW.graphs = () => MW.plan().programs.flatMap((p) => p.layers.map((g) => (p.name ? { ...g, name: `${p.name}: ${g.name}` } : g)));
MW.section("layer", "A layer", "Operations that share one choice, and the values that flow between them. Red is communication.", (body) => {
  const graphs = MW.graphs(), picture = MW.el("div", { class: "card graph" }), facts = MW.el("div");
  const detail = (node) => facts.replaceChildren(MW.el("div", { class: "card" }, MW.el("b", {}, node.label), ` (${node.phase}, ${node.num_ops} operations)`, MW.el("p", {}, MW.symbols(node.notation)),
    MW.el("p", { class: "note" }, node.source), ...Object.entries(node.reads).map(([path, sent]) => MW.el("p", { class: "note" }, `reads ${path}${sent.length ? `, after ${sent.join(", ")}` : " unchanged"}`))));
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
