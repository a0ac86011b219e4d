/* Places a graph in rows: an edge that skips rows has a slot in each of them, so no edge runs behind a box. */
MW.box = { width: 268, height: 62, gapX: 24, gapY: 54, slot: 14 };
MW.depths = (graph) => {
  const depth = graph.nodes.map(() => 0), into = graph.nodes.map(() => []);
  for (const edge of graph.edges) if (edge.from < edge.to) into[edge.to].push(edge.from);
  graph.nodes.forEach((_, i) => { depth[i] = into[i].length ? Math.max(...into[i].map((j) => depth[j])) + 1 : 0; });
  return depth;
};
/* Boxes and slots by rows; each edge as the chain of slots that it passes through, or no chain if it goes back up. */
MW.chains = (graph) => {
  const depth = MW.depths(graph), cells = graph.nodes.map((_, i) => ({ box: i, row: depth[i], above: [] }));
  const chains = graph.edges.map((edge) => {
    if (depth[edge.from] >= depth[edge.to]) return null;
    const chain = [cells[edge.from]];
    for (let row = depth[edge.from] + 1; row < depth[edge.to]; row += 1) {
      const slot = { box: -1, row, above: [chain[chain.length - 1]] };
      cells.push(slot);
      chain.push(slot);
    }
    cells[edge.to].above.push(chain[chain.length - 1]);
    return [...chain, cells[edge.to]];
  });
  const rows = [];
  for (const cell of cells) (rows[cell.row] = rows[cell.row] || []).push(cell);
  return { cells, chains, rows };
};
/* Each row in the order of the boxes above it, side by side around the middle; y is the upper edge, x the centre. */
MW.layout = (graph) => {
  const { cells, chains, rows } = MW.chains(graph), { width, height, gapX, gapY, slot } = MW.box;
  const size = (cell) => (cell.box < 0 ? slot : width + gapX), wides = rows.map((row) => row.reduce((sum, cell) => sum + size(cell), 0));
  const wide = Math.max(420, ...wides.map((w) => w + 60)), high = rows.length * (height + gapY) + 10;
  rows.forEach((row, r) => {
    row.forEach((cell, n) => { cell.centre = cell.above.length ? cell.above.reduce((sum, a) => sum + a.x, 0) / cell.above.length : (cell.box < 0 ? wide : n * 1e-3); });
    row.sort((a, b) => a.centre - b.centre);
    let x = (wide - wides[r]) / 2;
    for (const cell of row) {
      cell.x = x + size(cell) / 2;
      cell.y = r * (height + gapY) + 6;
      x += size(cell);
    }
  });
  return { boxes: cells.slice(0, graph.nodes.length), chains, wide, high };
};
/* An edge's path: straight down through its slots, curved only between rows. */
MW.route = (chain) => {
  const { height, gapY } = MW.box;
  return chain.slice(1).map((cell, i) => {
    const last = chain[i], y = last.y + height, bend = gapY / 2, through = last.box < 0 ? `L${last.x},${y}` : `M${last.x},${y}`;
    return `${through} C${last.x},${y + bend} ${cell.x},${cell.y - bend} ${cell.x},${cell.y}`;
  }).join(" ");
};
/* Back up: out below, round by the margin, in from above. */
MW.routeBack = (from, to, margin) => {
  const { height, gapY } = MW.box, low = from.y + height + gapY / 3, high = Math.max(2, to.y - gapY / 3);
  return `M${from.x},${from.y + height} L${from.x},${low} L${margin},${low} L${margin},${high} L${to.x},${high} L${to.x},${to.y}`;
};
