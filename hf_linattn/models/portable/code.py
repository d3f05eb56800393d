"""The files of code that a portable checkpoint holds, by name."""

from __future__ import annotations

import importlib

from transformers import PreTrainedModel

from .. import registry
from ..installed import installed_package
from . import feature_maps
from .folder import GENERATED
from .rewrite import PACKAGE, flat_import, flat_name, modules_from, package_of, rewritten

LICENCE = """\
# Licensed under the Apache License, Version 2.0 (the "License"); you may not use this file except in compliance with
# the License. You may obtain a copy of the License at http://www.apache.org/licenses/LICENSE-2.0
# Unless required by applicable law or agreed to in writing, software distributed under the License is distributed on
# an "AS IS" BASIS, WITHOUT WARRANTIES OR CONDITIONS OF ANY KIND, either express or implied. See the License for the
# specific language governing permissions and limitations under the License.
"""

ENTRY = '''\
"""Configuration and models: those of an installed hf_linattn, or else of the files beside this one."""

from .{choice} import installed_package

package = installed_package("{version}")
if package is None:
    from .{ops} import register_feature_map
    from .{registry} import HEADS, register_models
{imports}

    register_models()  # heads ask AutoModel for the model below them
    # A class of this file, and not of the one that defines it, is saved with this file and all that it leads to.
    {config}.__module__ = __name__
    {config}.register_for_auto_class()
    for auto_class, model_class, _ in HEADS:
        if model_class.config_class is {config}:
            model_class.__module__ = __name__
            model_class.register_for_auto_class(auto_class.__name__)
else:
    register_feature_map = package.register_feature_map
{assignments}
'''

USERS_MAP = """
from .{file} import {cls}

register_feature_map({name!r})({cls})
"""


def code_of(model: PreTrainedModel) -> dict[str, str]:
    """The text of every file of code, by file name: the one that config.json names, and what it imports.

    Raises:
        ValueError: the model's class or a feature map cannot be carried.
    """
    config_class = type(model.config)
    heads = [head for _, head, _ in registry.HEADS if head.config_class is config_class]
    name = type(model).__name__.removeprefix("FSDP")
    if name not in {head.__name__ for head in heads}:
        raise ValueError(
            f"portable=True carries the classes of {PACKAGE}, and {name} is defined in {type(model).__module__}; "
            f"choose one of {[head.__name__ for head in heads]}"
        )
    users = feature_maps.users_maps(model)
    sources = {cls.__module__: feature_maps.source_of(name, cls) for name, cls in users.items()}
    needed = [part for source in sources.values() for part in feature_maps.parts_used(source)]
    choice = installed_package.__module__
    modules = modules_from([registry.__name__, choice, *needed])

    entry, configuration = f"modeling_{config_class.model_type}", f"configuration_{config_class.model_type}"
    flat = {config_class.__module__: configuration}
    for module in modules:
        flat.setdefault(module, flat_name(module, [entry, *flat.values()]))
    carried: dict[str, str] = {}
    for module in sources:
        carried[module] = flat_name(module, [entry, *flat.values(), *carried.values()], prefix="feature_map_")

    version = importlib.import_module(PACKAGE).__version__
    files = {}
    for module, source in modules.items():
        text = rewritten(source, package_of(module), lambda brought: flat_import(brought, flat))
        files[flat[module]] = _header(version, module) + text
    for module, source in sources.items():
        title = f"{GENERATED}{version}: the module {module}, which defines a feature map.\n\n"
        files[carried[module]] = title + feature_maps.flat_source(source, flat, flat[choice], version)
    classes = [config_class, *heads]
    text = ENTRY.format(
        version=version,
        choice=flat[choice],
        ops=flat[f"{PACKAGE}.ops"],
        registry=flat[registry.__name__],
        config=config_class.__name__,
        imports="\n".join(f"    from .{flat[cls.__module__]} import {cls.__name__}" for cls in classes),
        assignments="\n".join(f"    {cls.__name__} = package.{cls.__name__}" for cls in classes),
    )
    for name, cls in users.items():
        text += USERS_MAP.format(file=carried[cls.__module__], cls=cls.__name__, name=name)
    files[entry] = _header(version) + text
    return {f"{name}.py": text for name, text in sorted(files.items())}


def _header(version: str, module: str | None = None) -> str:
    source = f", module {module}" if module else ""
    return f"{LICENCE}#\n{GENERATED}{version}{source}. Change the package, not this copy.\n\n"
