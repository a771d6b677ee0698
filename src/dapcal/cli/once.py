"""Options of one value are given once: a second one is refused, and does not take the first one's place in silence."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from dapcal.cli.common import output

_INSTEAD = {"target": "a model has one target: fit a model for each, with --drop for the others"}


class Once(TyperCommand):
    """A command that says so where an option comes twice that takes one value."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Options are counted first; what else is wrong with them is found as ever."""
        if args:
            counted = self.make_parser(ctx).parse_args(args=list(args))[2]  # every option as often as it was given
            for option in counted:
                if option.param_type_name == "option" and not _may_be_repeated(option) and counted.count(option) > 1:
                    instead = _INSTEAD.get(option.name or "", "give it once")
                    with output(as_json="--json" in args):
                        raise ValueError(f"{option.opts[0]} was given {counted.count(option)} times; {instead}")
        return super().parse_args(ctx, args)


def _may_be_repeated(option: Any) -> bool:
    """Lists, and switches that can only be turned on."""
    return bool(option.multiple or option.count or (option.is_flag and not option.secondary_opts))
