"""Clusters described in TOML files, good and bad."""

from pathlib import Path

import pytest

from meshwright.errors import ClusterError
from meshwright.hardware import cluster

ROOT = Path(__file__).parents[2]
PLAIN = 'hosts = 4\ndevices_per_host = 8\nchip = "h100"\n'


@pytest.fixture
def load(tmp_path):
    def load_text(text):
        path = tmp_path / "lab.toml"
        path.write_text(text, encoding="utf-8")
        return cluster(str(path))

    return load_text


def test_a_plain_file_equals_the_short_description(load):
    found = load(PLAIN)
    assert found.name == "lab"
    assert found.host == cluster("4x8 h100").host
    assert found.chip == cluster("4x8 h100").chip


def test_the_annotated_example_loads():
    found = cluster(ROOT / "examples" / "cluster.toml")
    assert found.num_devices == 32


def test_links_can_be_overridden(load):
    found = load(PLAIN + '[inter]\nlink = "ethernet"\nbandwidth = "100Gbit/s"\nlatency_s = 1e-5\nefficiency = 0.5\n')
    assert found.inter.bandwidth == pytest.approx(12.5e9)
    assert found.inter.kind == "ethernet"
    assert min(protocol.hop_s for protocol in found.inter.protocols) == pytest.approx(1e-5)
    assert max(protocol.efficiency for protocol in found.inter.protocols) == pytest.approx(0.5)
    assert found.intra == cluster("4x8 h100").intra


def test_slower_links_make_slower_collectives(load):
    slow = load(PLAIN + '[inter]\nbandwidth = "1GB/s"\n').mesh((4, 8))
    usual = cluster("4x8 h100").mesh((4, 8))
    assert slow.collective_s("all_reduce", (0,), 1e8) > 5 * usual.collective_s("all_reduce", (0,), 1e8)
    assert slow.collective_s("all_reduce", (1,), 1e8) == usual.collective_s("all_reduce", (1,), 1e8)


def test_chip_figures_can_be_overridden(load):
    found = load(PLAIN + '[chip_overrides]\nmemory = "96GB"\nmemory_bandwidth = "2.4TB/s"\nbfloat16 = 800e12\n')
    assert found.memory_bytes == 96 * 10**9
    assert found.chip.memory_bandwidth == pytest.approx(2.4e12)
    assert found.chip.peak_flops("bfloat16") == pytest.approx(800e12)
    assert found.chip.peak_flops("float16") == pytest.approx(989.4e12)


def test_a_chip_can_come_from_its_own_file(load, tmp_path):
    catalogue = ROOT / "src" / "meshwright" / "hardware" / "catalogue"
    text = (catalogue / "h100-sxm-80gb.toml").read_text(encoding="utf-8")
    (tmp_path / "mine.toml").write_text(text.replace('name = "h100-sxm-80gb"', 'name = "mine"'), encoding="utf-8")
    assert load('hosts = 1\nchip = "mine.toml"\n').chip.name == "mine"


def test_a_torus_can_be_given(load):
    found = load('hosts = 8\ndevices_per_host = 4\nchip = "tpu-v4"\ntorus = [2, 4, 4]\n')
    assert found.torus_sizes == (2, 4, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("hosts = = 4", r"not valid TOML.*line 1"),
        ('hosts = 4\nchip = "h100', r"not valid TOML.*line 2"),
        ('chip = "h100"', r"'hosts' is missing.*add a line 'hosts"),
        ("hosts = 4", r"'chip' is missing"),
        ('hosts = 4\nchip = "h10000"', r"unknown chip 'h10000'.*nearest"),
        ('hosts = -4\nchip = "h100"', r"hosts is -4 but must be a whole number"),
        ('hosts = 4.5\nchip = "h100"', r"hosts is 4.5"),
        ('hosts = "4"\nchip = "h100"', r"hosts is '4'"),
        ('hosts = 4\nchip = "h100"\nhots = 3', r"unknown key 'hots'.*did you mean 'hosts'"),
        (PLAIN + "[intra]\nbandwith = 3e9", r"\[intra\]: unknown key 'bandwith'.*did you mean 'bandwidth'"),
        (PLAIN + "[intra]\nbandwidth = -3e9", r"\[intra\]: bandwidth is -3000000000.0 but must be above 0"),
        (PLAIN + '[intra]\nbandwidth = "fast"', r"cannot read 'fast'.*25GB/s"),
        (PLAIN + "[intra]\nbandwidth = true", r"must be a number"),
        (PLAIN + "[intra]\nbandwidth = inf", r"finite"),
        (PLAIN + "[inter]\nefficiency = 1.5", r"at most 1"),
        (PLAIN + '[inter]\nlink = "pigeon"', r"unknown link 'pigeon'.*known links"),
        (PLAIN + '[intra]\ntopology = "star"', r"topology 'star' is not one of switch"),
        (PLAIN + '[intra]\ntopology = "shared"', r"needs 'shared_bandwidth'"),
        (PLAIN + '[intra]\ntopology = "graph"\nedges = [[0, 1]]', r"edge \[0, 1\] must be"),
        (PLAIN + "[chip_overrides]\nmemory = 0", r"memory is 0 but must be above 0"),
        (PLAIN + "[chip_overrides]\nmemroy = 1", r"did you mean 'memory'"),
        ('hosts = 4\nchip = "h100"\nintra = 3', r"'intra' is 3 but must be a table"),
        (PLAIN + "torus = [4, 8]", r"remove it"),
        ('hosts = 8\nchip = "tpu-v4"\ntorus = [3, 5]', r"does not divide the 32 devices"),
        ('hosts = 8\nchip = "tpu-v4"\ntorus = 4', r"must be a list"),
        ('hosts = 8\nchip = "other.toml"', r"no file"),
        ("hosts = 8\nchip = 3", r"chip is 3 but must be text"),
    ],
)
def test_bad_files_are_refused_with_the_remedy(load, text, message):
    with pytest.raises(ClusterError, match=message) as caught:
        load(text)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_a_file_that_is_not_text_is_refused(tmp_path):
    (tmp_path / "lab.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ClusterError, match="cannot read"):
        cluster(tmp_path / "lab.toml")


def test_a_folder_is_refused(tmp_path):
    with pytest.raises(ClusterError, match="cannot read"):
        cluster(tmp_path)


def test_several_groups_of_hosts_make_a_mixed_cluster(tmp_path):
    path = tmp_path / "two.toml"
    path.write_text(
        '[[group]]\nhosts = 2\nchip = "h100"\n[[group]]\nhosts = 3\ndevices_per_host = 4\nchip = "a100-40gb"\n'
        '[group.inter]\nbandwidth = "10GB/s"\n'
    )
    found = cluster(path)
    assert [(g.num_hosts, g.devices_per_host, g.chip.name) for g in found.groups] == [
        (2, 8, "h100-sxm-80gb"),
        (3, 4, "a100-sxm-40gb"),
    ]
    assert found.num_devices == 28
    assert found.memory_bytes == min(g.memory_bytes for g in found.groups)
    with pytest.raises(ClusterError, match=r"several kinds.*pipeline=True"):
        found.mesh((28,))
    assert type(found).from_json(found.to_json()) == found


def test_a_group_is_checked_like_a_file(tmp_path):
    path = tmp_path / "bad.toml"
    path.write_text('[[group]]\nhosts = 2\nchip = "h100"\n[group.inter]\nbandwidth = 0\n')
    with pytest.raises(ClusterError, match=r"bad.toml \[\[group\]\] 1 \[inter\]: bandwidth is 0 but must be above 0"):
        cluster(path)
    path.write_text("group = 3\n")
    with pytest.raises(ClusterError, match=r"one \[\[group\]\] for each kind of host"):
        cluster(path)
