"""What message passing and its preparation spend their time on, in NumPy: run where kernels are interpreted.

Each function does what the one of the same name does in `model.py`, `half_edges.py` or `bounds/message_passing.py`,
with the same results.
"""

import numpy as np


def extent(costs, impossible):
    possible = costs[np.abs(costs) < impossible]
    whole = (possible == np.floor(possible)).all()
    return possible.min(initial=np.inf), possible.max(initial=-np.inf), whole


def write_both(mat, source, rows, columns, begin, mats):
    for i in range(len(source)):
        size = rows[i] * columns[i]
        block = mat[source[i] : source[i] + size]
        mats[begin[i] : begin[i] + size] = block
        mats[begin[i] + size : begin[i] + 2 * size] = block.reshape(rows[i], columns[i]).T.ravel()


def number(bits, begin, rows, columns, kinds):
    block = bits[begin : begin + rows * columns].reshape(rows, columns)
    known: dict[bytes, int] = {}
    first = np.empty(rows, dtype=np.int64)
    for a in range(rows):
        count = len(known)
        kinds[a] = known.setdefault(block[a].tobytes(), count)
        if len(known) > count:
            first[count] = a
    return first, len(known)


def pull(links, off, m, h, u, spare, moved):
    v, other = links.far[h], links.back[h]
    own, far = links.num_kinds[h], links.num_kinds[other]
    spare[:far] = -np.inf
    kv, ku = off[v + 1] - off[v], off[u + 1] - off[u]
    kinds = links.kinds[links.kind[other] : links.kind[other] + kv]
    np.maximum.at(spare, kinds, m[links.msg[other] : links.msg[other] + kv])
    lean = links.leans[links.lean[h] : links.lean[h] + far * own].reshape(far, own)
    least = (lean - spare[:far, None]).min(axis=0, initial=np.inf)
    m[links.msg[h] : links.msg[h] + ku] = least[links.kinds[links.kind[h] : links.kind[h] + ku]]


def gather(links, off, theta, m, u, d):
    d[:] = theta[off[u] : off[u + 1]]
    for h in range(links.hoff[u], links.hoff[u + 1]):
        d += m[links.msg[h] : links.msg[h] + len(d)]
    return d.min(initial=np.inf)
