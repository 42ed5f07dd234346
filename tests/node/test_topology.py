"""Node files and the graphs they describe."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from npusim.config.load import list_devices
from npusim.config.node_file import NodeSpec, is_node, list_nodes, load_node
from npusim.config.quantity import has_unit
from npusim.errors import SpecError
from npusim.machines.node.topology import Topology
from tests.node.conftest import assumed, changed

if TYPE_CHECKING:
    from pathlib import Path


def test_packaged_nodes_load_and_every_number_has_a_unit_and_a_source() -> None:
    assert list_nodes() == ["ascend_910b2_x8", "h100_x2", "h200_x2", "h200_x4", "v100_x8"]
    assert not set(list_nodes()) & set(list_devices())
    for name in list_nodes():
        node = load_node(name)
        assert node.name == name
        assert all(has_unit(key.rpartition(".")[2]) and fact.source for key, fact in node.facts())


@pytest.mark.parametrize(("name", "is_one"), [("h200_x2", True), ("ascend-910b2-x8", True), ("h200", False)])
def test_node_files_are_known_by_their_names(name: str, is_one: bool) -> None:
    assert is_node(name) is is_one


def test_full_mesh_has_seven_links_of_28_gigabytes_each_way(mesh: NodeSpec) -> None:
    topology = Topology(mesh)
    assert topology.is_full_mesh
    assert len(topology.edges()) == 8 * 7
    assert [e.name for e in topology.route(2, 5)] == ["hccs 2>5"]
    assert topology.route(2, 5)[0].bytes_per_s == 28e9


def test_switch_is_two_hops(pair: NodeSpec) -> None:
    assert [e.name for e in Topology(pair).route(0, 1)] == ["nvlink 0>nvlink", "nvlink nvlink>1"]


def test_hybrid_cube_mesh_has_a_ring_of_joined_devices() -> None:
    topology = Topology(load_node("v100_x8"))
    ring = topology.ring()
    assert sorted(ring) == list(range(8))
    assert all(len(topology.route(a, b)) == 1 for a, b in zip(ring, [*ring[1:], ring[0]], strict=True))
    # A pair listed twice has twice the bandwidth.
    assert topology.route(0, 3)[0].bytes_per_s == 50e9


def test_disconnected_devices_are_named(mesh: NodeSpec) -> None:
    link = mesh.links["hccs"].model_dump() | {"model": "edges", "edges": [[0, 1], [1, 2], [3, 4]]}
    cut = changed(mesh, device_count=assumed(6), links__hccs=link)
    with pytest.raises(SpecError, match="no link joins device 3, 4, 5 to device 0, 1, 2"):
        Topology(cut)


def test_link_without_bandwidth_is_refused_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "mine_x8.yaml"
    zero = '{value: 0, basis: assumed, source: "test"}'
    file.write_text(f"schema: npusim.node/1\nextends: ascend_910b2_x8\nlinks.hccs.bytes_per_s: {zero}\n")
    with pytest.raises(SpecError, match=r"mine_x8.yaml:3  links.hccs.bytes_per_s.*greater than 0"):
        load_node(file)


def test_edge_to_a_missing_device_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "mine_x8.yaml"
    file.write_text("schema: npusim.node/1\nextends: v100_x8\nlinks.nvlink.edges: [[0, 9]]\n")
    with pytest.raises(SpecError, match=r"0-9 does not join two of the 8 devices 0..7"):
        load_node(file)


def test_unknown_driver_is_refused_with_those_there_are(mesh: NodeSpec) -> None:
    with pytest.raises(SpecError, match="no driver 'sm' here; allowed: sdma, aiv,"):
        mesh.driver("sm")


def test_file_of_any_name_is_a_node_by_its_schema(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("schema: npusim.node/1\nextends: h200_x2\nname: mine\n")
    assert is_node(file)
    assert load_node(file).name == "mine"


def test_search_for_a_ring_ends_where_there_is_none(mesh: NodeSpec) -> None:
    # An odd grid has no cycle through all devices; to prove that by search takes longer than one lives.
    side = 7
    right = [[y * side + x, y * side + x + 1] for y in range(side) for x in range(side - 1)]
    down = [[v, v + side] for v in range(side * side - side)]
    link = mesh.links["hccs"].model_dump() | {"model": "edges", "edges": right + down}
    grid = changed(mesh, device_count=assumed(side * side), links__hccs=link)
    assert Topology(grid).ring() == tuple(range(side * side))


@pytest.mark.parametrize("side", [4, 8])
def test_torus_has_a_ring_of_joined_devices(mesh: NodeSpec, side: int) -> None:
    places = [(x, y) for y in range(side) for x in range(side)]
    right = [[y * side + x, y * side + (x + 1) % side] for x, y in places]
    down = [[y * side + x, (y + 1) % side * side + x] for x, y in places]
    link = mesh.links["hccs"].model_dump() | {"model": "edges", "edges": right + down}
    topology = Topology(changed(mesh, device_count=assumed(side * side), links__hccs=link))
    ring = topology.ring()
    assert sorted(ring) == list(range(side * side))
    assert all(topology.graph.has_edge(a, b) for a, b in zip(ring, ring[1:] + ring[:1], strict=True))
