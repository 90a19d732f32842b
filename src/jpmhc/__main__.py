from jpmhc.cli import main

main()
