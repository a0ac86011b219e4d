"""What `test_processes.py` runs in two processes of four devices each.

Usage: in_processes.py PROCESS PORT
"""

import json
import os
import signal
import sys
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import meshwright as mw
from meshwright import jax_devices
from meshwright.runtime.cpu_turns import add_threads
from meshwright.runtime.transfer import pulls
from meshwright.runtime.transfer.permutes import Permutes
from meshwright.runtime.transfer.pulls import Pulls
from meshwright.runtime.transfer.reshard import Transfer
from tests.runtime.transfer.pairs import as_bytes, random_pair


def placed(values, sharding):
    """An array of which each process makes its own shards; other processes have a handle without shards."""
    return jax.make_array_from_callback(values.shape, sharding, lambda index: values[index], values.dtype)


def is_equal(array, values):
    return all(as_bytes(shard.data) == as_bytes(values[shard.index]) for shard in array.addressable_shards)


def random_pairs(transport, seeds):
    """How many pairs are moved, the seeds that came out wrong, and the bytes that crossed against the bound."""
    wrong = []
    for seed in seeds:
        pair = random_pair(np.random.default_rng(seed))
        array = placed(pair.values, pair.source)
        transfer = Transfer(array.shape, array.dtype, pair.source, pair.target, transport=transport)
        moved = [transfer(array), transfer(array)]
        if not all(is_equal(each, pair.values) and each.sharding == pair.target for each in moved):
            wrong.append(seed)
    return {"num": len(seeds), "wrong": wrong}


def mesh(process, *shape):
    devices = [device for device in jax.devices() if device.process_index == process]
    return Mesh(np.array(devices).reshape(shape), ("x", "y")[: len(shape)])


def stages():
    """Microbatches from a stage in process 0 to one in process 1 and back, several of them in flight."""
    here = NamedSharding(mesh(0, 4), PartitionSpec("x"))
    there = NamedSharding(mesh(1, 2, 2), PartitionSpec("y", None))
    forth = Transfer((8, 6), np.dtype("float32"), here, there)
    back = Transfer((8, 6), np.dtype("float32"), there, here)
    batches = [np.arange(48, dtype=np.float32).reshape(8, 6) + i for i in range(4)]
    first = jax.process_index() == 0
    waits = [forth.start(placed(batch, here) if first else None) for batch in batches]
    moved = [wait() for wait in waits]
    returned = [back(array) for array in moved]
    return {
        "equal": all(is_equal(*each) for each in zip((*moved, *returned), (*batches, *batches), strict=True)),
        "shards": [len(moved[0].addressable_shards), len(returned[0].addressable_shards)],
        "crossed": forth.route.crossing_bytes,
        "size": batches[0].nbytes,
    }


def ahead():
    """A sender that is far ahead of its receiver, and already waits in a program of both."""
    here, there = (NamedSharding(mesh(process, 4), PartitionSpec("x")) for process in (0, 1))
    values = np.arange(2**16, dtype=np.float32)
    pulled = Transfer(values.shape, values.dtype, here, there)
    met = Transfer(values.shape, values.dtype, here, there, transport=Permutes)
    array = placed(values, here)
    if jax.process_index() == 1:
        time.sleep(1)
    moved = [pulled(array) for _ in range(20)]
    return all(is_equal(each, values) for each in (*moved, met(array)))


def deleted():
    """The sender donates or deletes an array, or keys, before the other process asks for them."""
    here, there = (NamedSharding(mesh(process, 4), PartitionSpec("x")) for process in (0, 1))
    values = np.arange(2**10, dtype=np.float32)
    bits = np.arange(16, dtype=np.uint32).reshape(8, 2)
    donating = jax.jit(lambda x: x * 0 - 1, donate_argnums=0)
    ends = {"donated": donating, "deleted": lambda array: array.delete(), "keys": lambda array: array.delete()}
    found = {}
    for name, end in ends.items():
        array = placed(values, here)
        if name == "keys":
            array = jax.random.wrap_key_data(placed(bits, NamedSharding(here.mesh, PartitionSpec("x", None))))
        transfer = Transfer(array.shape, array.dtype, here, there)
        if jax.process_index() == 0:
            wait = transfer.start(array)
            jax.block_until_ready(end(array))
            found[name] = wait().is_fully_addressable is False and array.is_deleted()
        else:
            time.sleep(0.5)
            moved = transfer(array)
            found[name] = is_equal(jax.random.key_data(moved), bits) if name == "keys" else is_equal(moved, values)
    return found


def others():
    """Keys, arrays without elements, and values of the host, between the processes."""
    source, target = (NamedSharding(mesh(process, 4), PartitionSpec("x")) for process in (0, 1))
    bits = np.arange(16, dtype=np.uint32).reshape(8, 2)
    keys = jax.random.wrap_key_data(placed(bits, NamedSharding(source.mesh, PartitionSpec("x", None))))
    moved = mw.reshard(keys, target)
    empty = mw.reshard(placed(np.zeros((4, 0), np.float32), source), target)
    values = [mw.reshard(value, target) for value in (np.arange(8.0), jnp.arange(8.0))]
    return {
        "keys": [as_bytes(jax.random.key_data(s.data)).hex() for s in moved.addressable_shards],
        "dtype": str(moved.dtype),
        "empty": [list(empty.shape), [list(shard.data.shape) for shard in empty.addressable_shards]],
        "value": all(is_equal(value, np.arange(8.0, dtype=np.float32)) for value in values),
    }


def losses():
    """Process 1 moves another array than process 0, and is then killed: what process 0 says, after how many seconds."""
    here, there = (NamedSharding(mesh(process, 4), PartitionSpec("x")) for process in (0, 1))
    if jax.process_index() == 1:
        Transfer((4, 2), np.dtype("float32"), there, here).start(placed(np.ones((4, 2), np.float32), there))
        jax_devices.publish("posted", "yes")
        time.sleep(3)
        os.kill(os.getpid(), signal.SIGKILL)
    assert jax_devices.read_published("posted", 60)
    found = {}
    for name, timeout_s in (("silent", 1.0), ("killed", 240), ("gone", 240), ("never met", 240)):
        if name == "never met":
            pulls._server.cache_clear()  # as in a process that has not been in touch with the other before
        started = time.monotonic()
        try:
            Transfer((8,), np.dtype("float32"), there, here, timeout_s=timeout_s)(None)
        except mw.ProcessError as error:
            found[name] = [str(error), time.monotonic() - started]
    return found


if __name__ == "__main__":
    add_threads(2)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[2]}", 2, int(sys.argv[1]))
    try:
        results = {
            "pulls": random_pairs(Pulls, range(12)),
            "permutes": random_pairs(Permutes, range(24, 30)),
            "stages": stages(),
            "ahead": ahead(),
            "deleted": deleted(),
            "others": others(),
        }
        print("RESULT " + json.dumps(results), flush=True)
        print("LOSSES " + json.dumps(losses()), flush=True)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # JAX would wait for the other process
