"""Large results on another host are lost with the process that made them. Workers without shared memory stand for hosts."""

from __future__ import annotations

import pytest
import torch

import actorrpc
from tests.actors.e2e.test_words import Speaker, take

pytestmark = pytest.mark.limit(60)


def test_a_result_that_was_not_fetched_is_lost_with_its_actor() -> None:
    with actorrpc.init(lane=False):
        actor = Speaker.remote()
        lost, fetched = actor.big.remote(), actor.big.remote()
        actorrpc.wait([lost, fetched], num_returns=2, fetch_local=False)
        value = actorrpc.get(fetched)
        actorrpc.kill(actor)
        with pytest.raises(actorrpc.ActorDiedError):
            actorrpc.get(actor.take.remote(1))
        with pytest.raises(
            actorrpc.PeerDiedError, match=r"the result of Speaker\.big .*is lost: the call was executed"
        ):
            actorrpc.get(take.remote(lost))
        assert torch.equal(actorrpc.get(fetched), value)
