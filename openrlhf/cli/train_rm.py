"""`openrlhf rm`: pairwise reward model."""

from openrlhf.cli.runner import supervised

main = supervised("rm")

if __name__ == "__main__":
    main()
