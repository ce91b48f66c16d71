"""The names that workflows import."""

from areal.api.cli_args import GenerationHyperparameters as GenerationHyperparameters
from areal.api.workflow_api import RolloutWorkflow as RolloutWorkflow
