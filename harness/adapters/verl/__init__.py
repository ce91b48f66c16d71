"""verl (interface of verl 0.9.1) over a session server: an agent loop for the `agent_loop_config_path` file.

    - name: session_agent
      _target_: harness.adapters.verl.SessionAgentLoop
      session_server: http://127.0.0.1:8000
      agent: sure_agent.run

Programs that outlive verl call `close`. See docs/embedding.md.
"""

from harness.adapters.episodes import close_episodes as close
from harness.adapters.verl.agent_loop import SessionAgentLoop
from harness.adapters.verl.output import report_batch

__all__ = ["SessionAgentLoop", "close", "report_batch"]
