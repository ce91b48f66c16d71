"""A template that loses tools or calls is named where an operator looks: in the log, in `/health`, in the record."""

import httpx
import pytest

from harness.engines.scripted import Script, ScriptedEngine
from harness.server.serving import serve
from harness.store.memory import MemoryStore
from harness.tokens.templates.chat_template import ChatTemplateTokenizer
from harness.tokens.templates.jinja_template import JinjaTemplate
from tests.builders import tool, toy_template, toy_tokenizer, user
from tests.logged import capture_logs
from tests.session_servers.served import PATIENCE_S, Client, says

WITHOUT_TOOLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("loses_tools", [True, False])
async def test_lost_tools_are_named_at_the_start_in_health_and_in_the_record(loses_tools):
    """Not so where the template shows them, nor in the record of a request that has none."""
    lossy = ChatTemplateTokenizer(toy_tokenizer(), JinjaTemplate(WITHOUT_TOOLS))
    engine, template = ScriptedEngine(toy_tokenizer(), Script(says("hello"))), lossy if loses_tools else toy_template()
    with capture_logs() as logs:
        async with (
            serve(engine, template, MemoryStore()) as running,
            httpx.AsyncClient(base_url=running.url, timeout=PATIENCE_S) as http,
        ):
            client = Client(http, engine, running.server, running.url, running.restored)
            session = await client.create()
            await client.chat(session, [user("a")], tools=[tool()])
            await client.chat(session, [user("b")])
            health = (await http.get("/health")).json()
            record = await client.record(session)

    faults = list(template.describe().faults)
    assert bool(faults) == loses_tools
    assert [event["fault"] for event in logs if event["event"] == "template_loses_tools"] == faults
    assert (health["status"], health["model_family"]) == ("ok", {"faults": faults})
    assert [turn["notes"].get("model_family_faults", []) for turn in record["turns"]] == [faults, []]
