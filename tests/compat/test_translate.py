"""Futures and errors under the drop-in behave like torch's."""

from __future__ import annotations

import pytest
import torch

from actorrpc import errors
from actorrpc.compat import translate
from actorrpc.serialization import tensors


def test_an_error_of_a_then_callback_is_also_a_runtime_error() -> None:
    future: translate.Future[int] = translate.Future()
    following = future.then(lambda _: {}["absent"])
    future.set_result(1)
    assert isinstance(following, translate.Future)
    with pytest.raises(RuntimeError, match="absent") as caught:
        following.wait()
    assert isinstance(caught.value, KeyError)
    with pytest.raises(TypeError, match="incompatible function arguments"):
        future.then(None)  # type: ignore[arg-type]


def test_wait_all_and_collect_all_end_with_the_first_failure() -> None:
    pending: translate.Future[int] = translate.Future()
    failed: translate.Future[int] = translate.Future()
    everything = translate.collect_all([pending, failed])
    assert not everything.done()
    failed.set_exception(ValueError("no"))
    for wait in (everything.wait, lambda: translate.wait_all([pending, failed])):
        with pytest.raises(ValueError, match="no"):
            wait()
    pending.set_result(1)


def test_wait_all_and_collect_all_return_all_results() -> None:
    mine: translate.Future[int] = translate.Future()
    theirs: torch.futures.Future[int] = torch.futures.Future()
    everything = translate.collect_all([mine, theirs])
    mine.set_result(1)
    assert not everything.done()
    theirs.set_result(2)
    assert everything.wait() == [mine, theirs]
    assert translate.wait_all([mine, theirs]) == [1, 2]
    assert translate.wait_all([]) == []


def test_timeout_errors_contain_torchs_message() -> None:
    future: translate.Future[int] = translate.Future()
    future.set_exception(errors.RpcTimeoutError("too late", maybe_executed=False, worker="a"))
    with pytest.raises(errors.RpcTimeoutError, match=r"too late \(RPC ran for more than") as caught:
        future.wait()
    assert caught.value.worker == "a"


@pytest.mark.parametrize(
    "error", [Exception("text"), OSError(2, "no file"), UnicodeDecodeError("a", b"", 0, 1, "b")]
)
def test_any_error_becomes_a_runtime_error(error: Exception) -> None:
    made = translate.as_runtime_error(error)
    assert isinstance(made, RuntimeError)
    assert str(error) in str(made)
    assert made.__cause__ is error


def test_too_many_arguments_of_a_script_function_raise_torchs_message() -> None:
    @torch.jit.script
    def one(x: torch.Tensor) -> torch.Tensor:
        return x

    translate.check_script_call(one, (1,))
    with pytest.raises(RuntimeError, match=r"one\(\) expected at most 1 argument"):
        translate.check_script_call(one, (1, 2))


def test_the_error_for_a_device_without_a_map_contains_torchs_message() -> None:
    with pytest.raises(errors.SerializationError) as caught:
        tensors.Outgoing(None).target(torch.device("cuda:0"))
    for _ in range(2):  # an error may be reworded more than once
        translate.reword(caught.value, torch.add)
    assert isinstance(caught.value, RuntimeError)
    caught.match(
        "^TensorPipe RPC backend only supports CPU tensors by default.*"
        "`set_device_map` on `TensorPipeRpcBackendOptions`.*Response device mapping is not available"
    )
