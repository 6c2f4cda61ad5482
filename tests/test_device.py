"""The card: present, selected, capped, of a known architecture: device.py."""

from __future__ import annotations

import logging
import types

import pytest
from fake_torch import MIB, Device, FakeTorch

from intern_decision_serve.device import (
    apply_cap,
    check_architecture,
    check_placement,
    drop_expandable_segments,
    is_cuda,
    name_device,
    select_device,
)
from intern_decision_serve.errors import DeviceAbsent, StartupRefused


@pytest.mark.parametrize(
    ("device", "cuda"), [("cuda", True), ("cuda:1", True), ("cpu", False)]
)
def test_cuda_is_told_by_the_name(device: str, cuda: bool) -> None:
    assert is_cuda(device) is cuda


@pytest.mark.parametrize(
    ("setting", "left"),
    [
        ("expandable_segments:True", None),
        ("max_split_size_mb:64,expandable_segments:True", "max_split_size_mb:64"),
        ("expandable_segments:False", None),
        ("max_split_size_mb:64", "max_split_size_mb:64"),
        ("", ""),
    ],
)
@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_expandable_segments_are_undone_before_torch_reads_them(
    name: str, setting: str, left: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    environ = {name: setting, "OTHER": "expandable_segments:True"}
    with caplog.at_level(logging.WARNING):
        drop_expandable_segments(environ)
    assert environ.get(name) == left
    assert environ["OTHER"] == "expandable_segments:True"
    assert len(caplog.records) == (1 if left != setting else 0)


def test_the_cpu_has_no_index_and_is_selected_without_cuda() -> None:
    torch = FakeTorch(devices=0)
    assert select_device(torch, "cpu") is None
    assert torch.cuda.events == []


@pytest.mark.parametrize(("device", "index"), [("cuda", 0), ("cuda:1", 1)])
def test_the_card_is_made_current_on_this_thread(device: str, index: int) -> None:
    torch = FakeTorch(devices=2)
    assert select_device(torch, device) == index
    assert torch.cuda.events == [f"set_device {index}"]


@pytest.mark.parametrize(("device", "devices"), [("cuda", 0), ("cuda:2", 2)])
def test_a_device_that_is_not_there_is_absent_not_refused(
    device: str, devices: int
) -> None:
    with pytest.raises(DeviceAbsent, match=f"INTERN_DECISION_DEVICE is '{device}'"):
        select_device(FakeTorch(devices=devices), device)
    assert DeviceAbsent.exit_status == 75


def test_the_cap_becomes_the_fraction_of_the_card() -> None:
    torch = FakeTorch(total_mib=16 * 1024)
    apply_cap(torch, 0, 4.0)
    assert torch.cuda.limit == 4 * 1024 * MIB


def test_no_cap_leaves_the_allocator_alone() -> None:
    torch = FakeTorch()
    apply_cap(torch, 0, None)
    assert torch.cuda.events == []


def test_a_cap_larger_than_the_card_is_refused_by_name() -> None:
    with pytest.raises(StartupRefused) as refusal:
        apply_cap(FakeTorch(total_mib=16 * 1024), 0, 24.0)
    assert str(refusal.value) == (
        "INTERN_DECISION_VRAM_CAP_GIB is 24: the card has 16.00 GiB"
    )


def test_a_cap_on_the_cpu_is_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    torch = FakeTorch(devices=0)
    apply_cap(torch, None, 4.0)
    assert torch.cuda.events == []
    assert len(caplog.records) == 1


def model(*devices: str) -> types.SimpleNamespace:
    tensors = [
        (f"layer.{place}", types.SimpleNamespace(device=Device(name)))
        for place, name in enumerate(devices)
    ]
    return types.SimpleNamespace(
        named_parameters=lambda: iter(tensors[:-1]),
        named_buffers=lambda: iter(tensors[-1:]),
    )


@pytest.mark.parametrize(
    ("devices", "index"),
    [(("cuda", "cuda:0"), 0), (("cuda:1", "cuda:1"), 1), (("cpu", "cpu"), None)],
)
def test_a_model_on_the_asked_device_passes(
    devices: tuple[str, ...], index: int | None
) -> None:
    check_placement(model(*devices), index)


@pytest.mark.parametrize(
    ("devices", "index", "place"),
    [
        (("cuda", "cpu"), 0, "layer.1 is on cpu"),
        (("cuda:1", "cuda:0"), 0, "layer.0 is on cuda:1"),
        (("cuda", "cuda"), None, "layer.0 is on cuda:0"),
    ],
)
def test_one_weight_or_buffer_elsewhere_refuses(
    devices: tuple[str, ...], index: int | None, place: str
) -> None:
    with pytest.raises(StartupRefused, match=place):
        check_placement(model(*devices), index)


def test_an_arch_list_without_the_card_refuses() -> None:
    torch = FakeTorch(capability=(12, 0), arch_list=("sm_80", "compute_90"))
    with pytest.raises(StartupRefused) as refusal:
        check_architecture(torch, 0)
    assert str(refusal.value) == (
        "torch 2.10.0+fake has no code for this card's sm_120; "
        "it was built for sm_80, compute_90"
    )


def test_a_known_architecture_passes_and_the_cpu_has_none() -> None:
    check_architecture(FakeTorch(), 0)
    check_architecture(FakeTorch(arch_list=()), None)


@pytest.mark.parametrize(("index", "name"), [(0, "Fake H200"), (None, "cpu")])
def test_the_device_has_a_name(index: int | None, name: str) -> None:
    assert name_device(FakeTorch(), index) == name
