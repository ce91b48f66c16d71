"""The training script: each episode runs `sure_agent.run` on its own session."""

import os


def train(config, rows):
    """`rows` have `messages`, and whatever the agent wants to know."""
    from areal import PPOTrainer
    from areal.api.cli_args import GenerationHyperparameters

    with PPOTrainer(config, train_dataset=rows) as trainer:
        trainer.train(
            workflow="harness.adapters.areal.SessionWorkflow",
            workflow_kwargs={
                "session_server": os.environ["SESSION_SERVER"],
                "agent": "sure_agent.run",
                "gconfig": GenerationHyperparameters(max_new_tokens=512, max_tokens=8192),
            },
        )
