// Lookaside keeps the KV cache of vLLM workers outside the engine. This binary is the sidecar and the tools to look at it.
package main

import (
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"lookaside/sidecar"
)

func main() {
	if err := newRoot().Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "lookaside:", err)
		os.Exit(1)
	}
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:           "lookaside",
		Short:         "KV-cache sidecar for vLLM: no prefix is prefilled twice on a host",
		SilenceErrors: true, // main prints it
		SilenceUsage:  true,
	}
	root.CompletionOptions.HiddenDefaultCmd = true
	root.SetFlagErrorFunc(flagError)
	root.AddCommand(newServe(), newStatus(), newTiers(), newLookup(), newPrefetch(), newPin(), newUnpin(), newClear(), newMove(), newCheck(), newConfig(), newDAX(), newSimulate(), newBench(), newVersion())
	return root
}

// flagError makes a command name the nearest right flag when it is given an unknown one.
func flagError(cmd *cobra.Command, err error) error { return sidecar.FlagError(cmd.Flags(), err) }
