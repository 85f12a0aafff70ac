"""`openrlhf sft`: supervised fine-tuning and continued pre-training."""

from openrlhf.cli.runner import supervised

main = supervised("sft")

if __name__ == "__main__":
    main()
