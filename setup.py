"""Puts configs/ into the wheel as surojax/configs, where `--config NAME` finds them; pyproject.toml says the rest."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class WithConfigs(build_py):
    """`build_py` that copies configs/ as well; an editable install reads them where they are."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            folder = Path(self.build_lib, "surojax", "configs")
            folder.mkdir(parents=True, exist_ok=True)
            for file in Path(__file__).parent.glob("configs/*.py"):
                self.copy_file(str(file), str(folder / file.name))


setup(cmdclass={"build_py": WithConfigs})
