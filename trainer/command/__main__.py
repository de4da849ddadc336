"""The console script ``torpor``: what ``python -m trainer`` is."""

from trainer.command.hashes import restart_with_fixed_hashes


def main() -> None:
    restart_with_fixed_hashes()
    from trainer.__main__ import main as run  # seconds, which only the process that stays should spend

    run()


if __name__ == "__main__":
    main()
