// Lookaside keeps the KV cache of vLLM workers outside the engine. This binary is the sidecar and
// the tools to inspect it.
package main

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/spf13/cobra"
	_ "golang.org/x/crypto/x509roots/fallback" // for TLS where no authorities are installed: images

	"lookaside/sidecar"
	"lookaside/sidecar/settings"
)

func main() {
	root := newRoot()
	if completing() {
		forCompletion(root)
	}
	if err := root.Execute(); err != nil {
		fmt.Fprintln(os.Stderr, "lookaside:", err)
		code := exitFailure
		if c := (coded{}); errors.As(err, &c) {
			code = c.code
		}
		os.Exit(code)
	}
}

// These are the exit codes of failed commands. docs/operations.md lists them too.
const (
	exitFailure  = 1
	exitNone     = 69 // EX_UNAVAILABLE: there is no sidecar to take over from
	exitOwned    = 75 // EX_TEMPFAIL: another sidecar has the directory, and goes on
	exitSettings = 78 // EX_CONFIG: the sidecar cannot start on this host with these settings
)

// coded is an error with the exit code of the process.
type coded struct {
	code int
	error
}

func (c coded) Unwrap() error { return c.error }

// helpColumns is the width of the help of flags.
const helpColumns = 120

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:     "lookaside",
		Version: sidecar.VersionLine(),
		Short:   "KV-cache sidecar for vLLM: no prefix is prefilled twice on a host",
		Long: `KV-cache sidecar for vLLM: no prefix is prefilled twice on a host.

lookaside serve runs a sidecar. vLLM's connector finds it by its directory (runtime.dir), and so do
the other commands. lookaside doctor says whether it works and what to do, lookaside status and
lookaside top show what it does.

Settings come from a YAML file (--config), environment variables LOOKASIDE_* and flags, each
overriding the one before.`,
		SilenceErrors: true, // main prints it
		SilenceUsage:  true,
	}
	root.SetVersionTemplate("{{.Version}}\n")
	root.SetFlagErrorFunc(flagError)
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), "FlagUsages",
		fmt.Sprint("FlagUsagesWrapped ", helpColumns)))
	root.AddCommand(newServe(), newReady(), newStatus(), newList(), newTop(), newTiers(),
		newLookup(), newWhy(), newPrefetch(),
		newPin(), newUnpin(), newWeights(), newClear(), newMove(), newCheck(), newConfig(),
		newDAX(), newDoctor(), newRecord(), newSimulate(), newMan(), newVersion())
	return root
}

// flagError adds the nearest right flag to the error about an unknown one.
func flagError(cmd *cobra.Command, err error) error { return settings.FlagError(cmd.Flags(), err) }
