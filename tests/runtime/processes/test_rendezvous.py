"""Processes that meet: all are let go together, and whoever is missing or does not fit is named."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

import meshwright as mw
from meshwright.runtime.processes.connections import RESERVED, keep_alive, reserved_port, split_address
from meshwright.runtime.processes.rendezvous import meet

pytestmark = pytest.mark.devices


def free_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def until_connected(address):
    while True:
        try:
            return socket.create_connection(split_address(address))
        except ConnectionRefusedError:  # it does not listen yet
            continue


def meet_all(*members, timeout_s=30.0):
    """What each (process, number of processes) finds, or the error it gets."""
    address = free_address()

    def one(member):
        process, count = member
        try:
            return meet(address, count, process, timeout_s=timeout_s, heartbeat_s=10)
        except mw.ProcessError as error:
            return str(error)

    with ThreadPoolExecutor(len(members)) as pool:
        return address, list(pool.map(one, members))


def test_all_are_connected_through_the_first_and_its_port_is_free_again():
    address, found = meet_all((2, 3), (0, 3), (1, 3))
    assert [sorted(connections) for connections in found] == [[0], [1, 2], [0]]
    found[1][2].sendall(b"for the third")
    assert found[0][0].recv(100) == b"for the third"
    with socket.create_server(split_address(address)):  # as JAX's service does, with the connections open
        pass
    for connections in found:
        for connection in connections.values():
            connection.close()


def test_many_are_connected_as_a_tree():
    _, found = meet_all(*((process, 24) for process in reversed(range(24))))
    assert not [said for said in found if isinstance(said, str)]
    found = found[::-1]
    assert sorted(found[0]) == [1, 2, 3, 4] and sorted(found[5]) == [1, 21, 22, 23] and sorted(found[23]) == [5]
    for process, connections in enumerate(found):
        for peer, connection in connections.items():
            connection.sendall(b"%02d from %02d" % (peer, process))
    for process, connections in enumerate(found):
        for peer, connection in connections.items():
            assert connection.recv(100) == b"%02d from %02d" % (process, peer)
            connection.close()


def test_who_is_missing_between_others_is_named_in_all():
    _, found = meet_all(*((process, 8) for process in (0, 2, 3, 5, 6)), timeout_s=1.0)
    assert all(said.startswith("processes 1, 4, 7 of 8 did not connect to process 0") for said in found)


def test_a_process_that_ended_meanwhile_is_named_when_all_others_are_there():
    address = free_address()
    options = {"timeout_s": 30.0, "heartbeat_s": 10.0}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, address, 3, 0, **options)
        with until_connected(address) as gone:
            gone.sendall(b'{"process": 1, "of": 3}\n')
            gone.recv(100)
        second = pool.submit(meet, address, 3, 2, **options)
        for found in (first, second):
            with pytest.raises(mw.ProcessError, match="process 1 connected and ended before all processes had"):
                found.result()


def test_who_did_not_come_is_named_in_all_that_did():
    address, found = meet_all((0, 4), (2, 4), timeout_s=1.0)
    port = split_address(address)[1]
    said = f"processes 1, 3 of 4 did not connect to process 0 at port {port} within 1 s; see whether they were started"
    assert said in found[0] and found[0] == found[1]


def test_a_first_process_that_cannot_be_reached_is_named_with_its_address():
    address, [found] = meet_all((1, 2), timeout_s=0.5)
    assert f"process 1 could not reach process 0 at {address} within 0.5 s" in found


@pytest.mark.parametrize(
    ("members", "said"),
    [
        ([(0, 2), (1, 3)], "process 1 was started as one of 3 processes, and process 0 as one of 2"),
        ([(0, 3), (1, 3), (1, 3)], "two processes say that they are process 1; give each of them its own process_id"),
    ],
)
def test_processes_that_do_not_fit_together_are_told_so(members, said):
    _, found = meet_all(*members)
    assert found == [said] * len(members)


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        ({"jax": "0.11.0"}, "process 1 has jax 0.11.0, and process 0 has jax 0.10.2; install the same versions"),
        (None, "process 1 has jax of an unknown version, and process 0 has jax 0.10.2"),
    ],
)
def test_processes_with_other_versions_are_named(theirs, said):
    address = free_address()
    options = {"timeout_s": 30.0, "heartbeat_s": 10.0}
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, address, 2, 0, versions={"jax": "0.10.2"}, **options)
        second = pool.submit(meet, address, 2, 1, versions=theirs, **options)
        for found in (first, second):
            with pytest.raises(mw.ProcessError, match=said):
                found.result()


def test_strangers_at_the_port_are_shown_out():
    address = free_address()
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, address, 2, 0, timeout_s=30.0, heartbeat_s=10)
        for words in (b"PRI * HTTP/2.0\r\n", b'{"process": "x"}\n', b""):
            with until_connected(address) as stranger:
                stranger.sendall(words)
        second = pool.submit(meet, address, 2, 1, timeout_s=30.0, heartbeat_s=10)
        for found in (first.result(), second.result()):
            [connection] = found.values()
            connection.close()


def test_a_port_that_is_in_use_is_named():
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(mw.ProcessError, match=f"cannot listen at port {port} .* give a free port"):
            meet(f"127.0.0.1:{port}", 2, 0, timeout_s=1.0, heartbeat_s=10)


@pytest.mark.parametrize("address", ["10.0.0.1", "host:", ":1", "host:99999", "host:x"])
def test_addresses_without_host_or_port_are_refused(address):
    with pytest.raises(mw.ProcessError, match="give host:port"):
        split_address(address)


def test_addresses_of_version_6_have_brackets():
    assert split_address("[::1]:80") == ("::1", 80)


@pytest.mark.parametrize("host", ["127.0.0.1", ""])
def test_a_reserved_port_is_kept_for_the_coordinator(monkeypatch, host):
    with reserved_port(host) as held:
        port = held.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        monkeypatch.setenv(RESERVED, str(port))
        bind = f"127.0.0.1:{port}" if host else None
        assert meet(f"127.0.0.1:{port}", 1, 0, timeout_s=1, heartbeat_s=10, bind=bind) == {}


def test_a_lost_host_is_noticed_before_jax_ends_the_process():
    """JAX may do so after half of its heartbeat's time, without a word of who was lost."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as connection:
        keep_alive(connection, 10.0)
        read = lambda name: connection.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"))  # noqa: E731
        assert 0 < read("KEEPIDLE") + read("KEEPINTVL") * read("KEEPCNT") <= 5
        assert 0 < read("USER_TIMEOUT") <= 5000
