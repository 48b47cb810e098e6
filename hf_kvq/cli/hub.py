# Copyright 2026 The hf_kvq authors. Licensed under the Apache License, Version 2.0.
"""`hf-kvq push`, `pull` and `show`: plans between folders and the Hub."""

from __future__ import annotations

import argparse
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..cache.files import read_facts
from ..hub import KVQPlan, PlanError
from ..hub.cards import summary
from .options import CommandError, Parser
from .report import describe_widths, format_bytes


Command = Callable[[argparse.Namespace], int]


def add_hub_commands(commands: argparse._SubParsersAction) -> None:
    """Add the three commands to the parser of `hf-kvq`."""
    push = _add(commands, "push", "upload a plan to the Hub", _push)
    push.add_argument("folder", metavar="FOLDER", help="where the plan is, as saved by KVQPlan.save_pretrained")
    push.add_argument("repo", metavar="REPO", help="id of the repository, made if it is not there")
    push.add_argument(
        "--path-in-repo", metavar="PATH", help="folder next to a model's weights, such as kvq/pmkvq-2.25bit"
    )
    push.add_argument("--private", action="store_true", default=None, help="if the repository is made")
    push.add_argument("--create-pr", action="store_true", help="open a pull request instead of committing")
    push.add_argument("--commit-message", metavar="TEXT")
    pull = _add(commands, "pull", "download a plan from the Hub", _pull)
    pull.add_argument("repo", metavar="REPO", help="id of the repository")
    pull.add_argument("folder", metavar="FOLDER", help="where to save it, such as my-model/kvq")
    show = _add(commands, "show", "say what a plan or a cache file holds", _show)
    show.add_argument(
        "plan", metavar="ID_OR_FOLDER", help="a repository of the Hub, a folder, or a file that a cache was saved in"
    )
    show.add_argument(
        "--json", action="store_true", help="print JSON: the plan, or what the file says about its cache"
    )
    for parser in (pull, show):
        parser.add_argument("--subfolder", default="", metavar="PATH", help="where in it, such as kvq/pmkvq-2.25bit")
    for parser in (push, pull, show):
        parser.add_argument("--revision", metavar="REV", help="branch, tag, commit or refs/pr/N (default: main)")
        parser.add_argument("--token", metavar="TOKEN", help="of the Hub (default: that of `hf auth login`)")


def _add(commands: argparse._SubParsersAction, name: str, summary: str, run: Command) -> Parser:
    parser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.set_defaults(parser=parser, run=run)
    return parser


def _one_line(command: Command) -> Command:
    """Errors of plans as errors of the command."""

    @functools.wraps(command)
    def run(arguments: argparse.Namespace) -> int:
        try:
            return command(arguments)
        except (PlanError, OSError) as error:
            raise CommandError(error) from error
        except ValueError as error:
            # Only a path that leads out of the repository is left.
            raise CommandError(error, status=2) from error

    return run


@_one_line
def _push(arguments: argparse.Namespace) -> int:
    info = KVQPlan.from_pretrained(arguments.folder).push_to_hub(
        arguments.repo,
        arguments.path_in_repo,
        private=arguments.private,
        token=arguments.token,
        revision=arguments.revision,
        create_pr=arguments.create_pr,
        commit_message=arguments.commit_message,
    )
    print(info.pr_url or info.commit_url)
    return 0


@_one_line
def _pull(arguments: argparse.Namespace) -> int:
    plan = _load(arguments.repo, arguments)
    plan.save_pretrained(arguments.folder)
    print(f"{plan!r} saved in {arguments.folder}", file=sys.stderr)
    return 0


@_one_line
def _show(arguments: argparse.Namespace) -> int:
    if Path(arguments.plan).is_file():
        try:
            facts, plan = read_facts(arguments.plan)
        except ValueError as error:
            raise CommandError(error) from error
        print(json.dumps(facts, indent=2) if arguments.json else _describe_cache(arguments.plan, facts, plan))
        return 0
    plan = _load(arguments.plan, arguments)
    print(json.dumps(plan.to_dict(), indent=2, sort_keys=True) if arguments.json else summary(plan))
    return 0


def _describe_cache(path: str, facts: dict[str, Any], plan: KVQPlan) -> str:
    rows, size = facts["batch"], Path(path).stat().st_size
    lines = [
        (
            "cache",
            f"{plan.method}, {rows} row{'s' if rows > 1 else ''} x {facts['columns']:,} tokens, {facts['dtype']}",
        ),
        ("model", str(plan.base_model)),
        ("bits", describe_widths(facts["layer_bits"])),
        ("size", f"{format_bytes(size)} in the file, {format_bytes(facts['exact_nbytes'])} in an ordinary cache"),
        ("made by", f"hf_kvq {plan.hf_kvq_version}"),
    ]
    return "\n".join(f"{name:<13}{text}" for name, text in lines)


def _load(name: str, arguments: argparse.Namespace) -> KVQPlan:
    return KVQPlan.from_pretrained(
        name, subfolder=arguments.subfolder, revision=arguments.revision, token=arguments.token
    )
