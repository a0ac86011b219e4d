"""What MkDocs does for this site besides its own: public names, the command's help, and files outside `docs/`.

Pages are written so that they also read well in the repository. Four things are put in when the site is built:
`::: mw.plan` becomes the documentation of the module that holds `plan` now, `<!-- commands -->` becomes the help of
every command, links to files outside `docs/` lead to copies of them under `repository/`, and formulas of
pages that have some between `$$` become MathML, which browsers show without a script.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
COPIES = "repository"
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)\s]*)?\)")
REMOTE = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?(?:https?:)?//[^>]*>""")
CODE = re.compile(r"(^```.*?^```$|`[^`\n]+`)", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r"\$\$(.+?)\$\$|\$([^$]+?)\$", re.DOTALL)
NAME = re.compile(r"^::: mw\.(\w+)$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Adds what pages link to outside `docs/`, and what those files link to in turn."""
    waiting = [(f"docs/{file.src_uri}", file.content_string) for file in files.documentation_pages()]
    while waiting:
        path, text = waiting.pop()
        for link in LINK.findall(text):
            target = _target(path, link[1])
            if target is None or target.startswith("docs/") or files.get_file_from_path(f"{COPIES}/{target}"):
                continue
            content = (ROOT / target).read_bytes()
            files.append(File.generated(config, f"{COPIES}/{target}", content=content))
            if target.endswith(".md"):
                waiting.append((target, content.decode()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Puts in names and commands, and turns links that leave `docs/` to the copies."""
    here = page.file.src_uri
    origin = here.removeprefix(f"{COPIES}/") if here.startswith(f"{COPIES}/") else f"docs/{here}"
    if "<!-- commands -->" in markdown:
        markdown = markdown.replace("<!-- commands -->", _commands())
    markdown = NAME.sub(_documented, markdown)
    if "$$" in markdown:
        parts = CODE.split(markdown)
        markdown = "".join(part if number % 2 else FORMULA.sub(_formula, part) for number, part in enumerate(parts))
    return LINK.sub(lambda link: _turned(link, origin, here), markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Refuses a page that would load something from a network."""
    found = REMOTE.search(output)
    if found:
        raise PluginError(f"{page.file.src_uri} would load {found[0]:.200}; keep it in docs/")
    return output


def _formula(found: re.Match[str]) -> str:
    from latex2mathml.converter import convert

    if found[1]:
        return convert(found[1], display="block")
    return f"<span>{convert(found[2])}</span>"  # at the start of a line, <math> alone would end the paragraph


def _target(path: str, link: str) -> str | None:
    """The file of the repository that a link on a page means; None for an address, or where there is no such file."""
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), link))
    return found if "://" not in link and (ROOT / found).is_file() else None


def _turned(link: re.Match[str], origin: str, here: str) -> str:
    target = _target(origin, link[2])
    if target is None:
        return link[0]
    place = target.removeprefix("docs/") if target.startswith("docs/") else f"{COPIES}/{target}"
    return f"{link[1]}{posixpath.relpath(place, posixpath.dirname(here) or '.')}{link[3] or ''})"


def _documented(match: re.Match[str]) -> str:
    """A public name's place in the source: names are loaded on first use, so the package itself does not show it."""
    import meshwright
    from meshwright.planner.methods import Method

    found = getattr(meshwright, match[1])
    options = [f"heading: mw.{match[1]}", f"toc_label: mw.{match[1]}"]
    if isinstance(found, type):
        is_plain = issubclass(found, (meshwright.MeshwrightError, Method))  # what they do is for the planner alone
        options += ["members: false" if is_plain else "inherited_members: true"]
    lines = [f"::: {found.__module__}.{found.__qualname__}", "    options:", *(f"      {line}" for line in options)]
    return "\n".join(lines)


def _commands() -> str:
    """Every command of the `meshwright` command with its arguments and options."""
    import typer

    from meshwright.cli.app import app

    group = typer.main.get_command(app)
    with typer.Context(group, info_name="meshwright") as context:
        names = group.list_commands(context)  # type: ignore[attr-defined]
        return "\n\n".join(_command(group.get_command(context, name), context) for name in names)  # type: ignore[attr-defined]


def _command(command: Any, parent: Any) -> str:
    with type(parent)(command, info_name=command.name, parent=parent) as context:
        if hasattr(command, "list_commands"):  # a group of commands
            return "\n\n".join(
                _command(command.get_command(context, n), context) for n in command.list_commands(context)
            )
        usage = " ".join([context.command_path, *command.collect_usage_pieces(context)])
        rows = [param.get_help_record(context) for param in command.get_params(context)]
    table = "\n".join(f"| `{name.strip()}` | {_cell(text)} |" for name, text in filter(None, rows))
    return f"## {context.command_path}\n\n{command.help}\n\n```text\n{usage}\n```\n\n| | |\n|---|---|\n{table}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
