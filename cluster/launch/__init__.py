"""Starting a cluster on other people's machines: Slurm jobs and Ray jobs."""

from __future__ import annotations

from cluster.launch.allocation import Allocation, RankPlacement, allocate
from cluster.launch.errors import (
    JobNotFoundError,
    LaunchConfigError,
    LaunchError,
    LinkError,
    NodeLostError,
    SlurmCommandError,
)
from cluster.launch.job_addresses import job_addresses
from cluster.launch.job_folder import Failure, JobFolder, JobPhase, JobState, find_job_folder
from cluster.launch.job_report import JobReport, report_job
from cluster.launch.node_pool import NodePool
from cluster.launch.sbatch_script import render_script
from cluster.launch.slurm_client import Partition, SlurmClient, SlurmJob
from cluster.launch.submission import Submission, submit_job

__all__ = [
    "Allocation",
    "Failure",
    "JobFolder",
    "JobNotFoundError",
    "JobPhase",
    "JobReport",
    "JobState",
    "LaunchConfigError",
    "LaunchError",
    "LinkError",
    "NodeLostError",
    "NodePool",
    "Partition",
    "RankPlacement",
    "SlurmClient",
    "SlurmCommandError",
    "SlurmJob",
    "Submission",
    "allocate",
    "find_job_folder",
    "job_addresses",
    "render_script",
    "report_job",
    "submit_job",
]
