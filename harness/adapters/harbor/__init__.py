"""Harbor (interface of harbor 0.26) over a session server: an agent for a job's `import_path`. See docs/tasks.md."""

from harness._front_door import lazy_loader

# Harbor, which has the agent's base, has an environment of its own.
__getattr__ = lazy_loader(globals(), {"SessionAgent": "harness.adapters.harbor.session_agent"})
