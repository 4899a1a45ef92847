package main

import (
	"os"
	"regexp"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"lookaside/sidecar/settings"
)

// completing reports whether a shell's completion script runs the command.
func completing() bool {
	return len(os.Args) > 1 && (os.Args[1] == cobra.ShellCompRequestCmd ||
		os.Args[1] == cobra.ShellCompNoDescRequestCmd)
}

// choice is the unit of a setting that has one of a few values, such as "text or json".
var choice = regexp.MustCompile(`^[a-z-]+(, [a-z-]+)* or [a-z-]+$`)

// forCompletion says what the values of flags are, in cmd and the commands below it, and keeps one
// sentence of each flag's text: shells show it beside the flag.
func forCompletion(cmd *cobra.Command) {
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		f.Usage, _, _ = strings.Cut(f.Usage, ". ")
		switch kind, _ := pflag.UnquoteUsage(f); {
		case kind == "directory":
			_ = cmd.MarkFlagDirname(f.Name)
		case f.Name == "config":
			_ = cmd.MarkFlagFilename(f.Name, "yaml", "yml")
		}
	})
	for _, s := range settings.All() {
		if cmd.Flags().Lookup(s.Flag()) == nil || !choice.MatchString(s.Unit) {
			continue
		}
		values := strings.Split(strings.Replace(s.Unit, " or ", ", ", 1), ", ")
		_ = cmd.RegisterFlagCompletionFunc(s.Flag(), cobra.FixedCompletions(values,
			cobra.ShellCompDirectiveNoFileComp))
	}
	for _, c := range cmd.Commands() {
		forCompletion(c)
	}
}
