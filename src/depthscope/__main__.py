from depthscope.cli import main

main()
