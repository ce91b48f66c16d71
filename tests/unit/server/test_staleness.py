"""The admission cap on staleness: a branch that is too many weight updates old does not continue."""

from pathlib import Path

import pytest

from tests.builders import user
from tests.session_servers.served import says, serving, session_on

NOWHERE = Path("/nowhere")


@pytest.mark.parametrize(("limit", "updates_met"), [(0, 0), (1, 1), (2, 2), (None, 3)])
async def test_a_branch_goes_on_until_its_oldest_token_is_too_old(limit, updates_met):
    """It meets as many updates as the limit says; the turn after the next one is refused for good."""
    async with serving(*says("one", "two", "three", "four", "five")) as client:
        session = await client.create(limits={} if limit is None else {"staleness": limit})
        history = [user("a")]
        refused_at = None
        for version in range(4):
            await client.engine.update_weights(NOWHERE, str(version))
            answer = await client.chat(session, history)
            if answer.status_code != 200:
                refused_at = version
                break
            history += [answer.json()["choices"][0]["message"], user("continue")]

        assert refused_at == (None if limit is None else updates_met + 1)
        [sample] = await client.samples(session)
        assert max(sample["behavior_versions"]) == updates_met


async def test_a_refusal_says_which_limit_it_is_and_new_branches_begin_fresh(client):
    """404 with `limit_reached`, which ends agents; a conversation of its own is under the live weights alone."""
    session = await client.create(limits={"staleness": 0})
    first = await client.say(session, [user("a")])
    await client.engine.update_weights(NOWHERE, "1")

    refused = await client.chat(session, [user("a"), first, user("b")])

    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "limit_reached")
    assert "began under weight version 0, 1 updates ago" in refused.json()["error"]["message"]
    assert await client.say(session, [user("another")])


async def test_the_lags_of_a_sample_count_from_the_weights_that_are_live_when_it_is_read(client, session):
    """Also when none of its tokens is that new: what a trainer asks is how old they are now."""
    first = await client.say(session, [user("a")])
    await client.engine.update_weights(NOWHERE, "1")
    await client.say(session, [user("a"), first, user("b")])
    found = []
    for version in (1, 3):
        await client.engine.update_weights(NOWHERE, str(version))
        [sample] = await client.samples(session)
        stale = sample["metadata"]["staleness"]
        found.append((stale["newest_version"], stale["lag_min"], stale["lag_max"]))

    assert found == [(1, 0, 1), (3, 2, 3)]


async def test_under_a_label_that_is_no_version_the_lags_count_from_the_sample():
    """The samples are read all the same: what was sampled has versions of its own."""
    async with session_on(*says("one")) as (client, session):
        await client.say(session, [user("a")])
        client.engine.relabel("updating-7")

        [sample] = await client.samples(session)

        assert sample["metadata"]["staleness"]["newest_version"] == 0
