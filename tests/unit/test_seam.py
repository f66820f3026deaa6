"""Replacements in Megatron, and the way back."""

from types import ModuleType, SimpleNamespace

import pytest

from edgc.config import ConfigError
from megatron.edgc.seam import RELIED_ON, Seam


class Base:
    def method(self) -> str:
        return "base"

    @staticmethod
    def static() -> str:
        return "base"


class Derived(Base): ...


def test_everything_is_restored_in_reverse_order_after_an_exception() -> None:
    module = SimpleNamespace(function=1)
    with pytest.raises(ZeroDivisionError), Seam() as seam:
        assert seam.replace(module, "function", 2) == 1
        assert seam.replace(module, "function", 3) == 2  # restored first: else 2 would be left
        assert module.function == 3
        raise ZeroDivisionError
    assert module.function == 1


def test_a_static_method_stays_one() -> None:
    with Seam() as seam:
        assert seam.replace(Base, "static", lambda: "edgc")() == "base"
    assert Base().static() == "base"


def test_what_was_inherited_is_inherited_again() -> None:
    one = Derived()
    with Seam() as seam:
        seam.replace(Derived, "method", lambda self: "class")
        seam.replace(one, "method", lambda: "object")
        assert one.method() == "object" and Derived().method() == "class"
    assert one.method() == "base"
    assert "method" not in vars(one) and "method" not in vars(Derived)


def test_a_name_that_is_not_there_is_not_replaced() -> None:
    module = SimpleNamespace()
    with Seam() as seam, pytest.raises(AttributeError, match="function"):
        seam.replace(module, "function", 1)
    assert vars(module) == {}


def test_one_run_at_a_time_replaces_functions_of_modules() -> None:
    module = ModuleType("training")
    module.function = 1  # type: ignore[attr-defined]
    with Seam() as first:
        first.replace(module, "function", 2)
        with Seam() as second, pytest.raises(ConfigError, match="EDGC is attached to another model of this process"):
            second.replace(module, "function", 3)
        second.replace(SimpleNamespace(function=1), "function", 3)  # what is of one model is no matter of the others
        second.close()
        assert vars(module)["function"] == 2
    with Seam() as third:
        assert third.replace(module, "function", 3) == 1


def test_every_method_of_megatrons_that_is_overridden_is_relied_on() -> None:
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from megatron.edgc.bucket_groups import EDGCBucketGroup
    from megatron.edgc.messages.p2p_communicator import EDGCP2PCommunicator

    listed = {row.name for row in RELIED_ON}
    for own, base in ((EDGCBucketGroup, _ParamAndGradBucketGroup), (EDGCP2PCommunicator, P2PCommunicator)):
        methods = {name for name, value in vars(own).items() if callable(value) and name in vars(base)}
        assert methods - {"__init__"}
        assert {f"{base.__name__}.{name}" for name in methods} <= listed
