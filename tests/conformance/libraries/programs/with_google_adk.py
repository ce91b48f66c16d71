# /// script
# requires-python = ">=3.11"
# dependencies = ["google-adk==2.13.0", "litellm==1.110.2"]
# ///
"""Google's Agent Development Kit with its model for litellm, and with its own."""

from conversation import MODEL, QUESTIONS, Way, play
from google.adk.agents import LlmAgent, RunConfig
from google.adk.agents.run_config import StreamingMode
from google.adk.models.google_llm import Gemini
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types
from typed_tools import TOOLS


async def converse(way: Way) -> list[str]:
    """Ask every question in one session of the runner."""
    model = Gemini(model=MODEL) if way.dialect == "gemini" else LiteLlm(model=f"openai/{MODEL}")
    agent = LlmAgent(name="assistant", model=model, tools=TOOLS)
    runner = InMemoryRunner(agent=agent, app_name="app")
    session = await runner.session_service.create_session(app_name="app", user_id="user")
    config = RunConfig(streaming_mode=StreamingMode.SSE if way.streams else StreamingMode.NONE)
    answers = []
    for question in QUESTIONS:
        content = types.Content(role="user", parts=[types.Part(text=question)])
        async for event in runner.run_async(
            user_id="user", session_id=session.id, new_message=content, run_config=config
        ):
            if event.is_final_response():
                answer = "".join(part.text or "" for part in event.content.parts if not part.thought)
        answers.append(answer)
    return answers


if __name__ == "__main__":
    play(converse)
