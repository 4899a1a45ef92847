package main

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"runtime/debug"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/cobra/doc"
	"github.com/spf13/pflag"

	"lookaside/sidecar"
)

// newMan returns the command that packages run to make the man pages. Users do not need it.
func newMan() *cobra.Command {
	return &cobra.Command{
		Use:   "man DIRECTORY",
		Short: "Write a man page for each command",
		Long: `Write a man page for each command into a directory, which is made if it is not there.

Their date is that of SOURCE_DATE_EPOCH (seconds since 1970), or of the commit that the binary was
built from, so that they are the same whenever they are made.`,
		Hidden: true,
		Args:   cobra.ExactArgs(1),
		RunE: func(_ *cobra.Command, args []string) error {
			date, err := manDate(os.Getenv("SOURCE_DATE_EPOCH"))
			if err != nil {
				return err
			}
			if err := os.MkdirAll(args[0], 0o755); err != nil {
				return err
			}
			return writePages(newRoot(), date, args[0])
		},
	}
}

// manDate returns the date of the pages. epoch is the text of SOURCE_DATE_EPOCH.
func manDate(epoch string) (time.Time, error) {
	if epoch != "" {
		seconds, err := strconv.ParseInt(epoch, 10, 64)
		if err != nil {
			return time.Time{}, fmt.Errorf("SOURCE_DATE_EPOCH: %w", err)
		}
		return time.Unix(seconds, 0).UTC(), nil
	}
	if info, ok := debug.ReadBuildInfo(); ok {
		for _, s := range info.Settings {
			if s.Key == "vcs.time" {
				return time.Parse(time.RFC3339, s.Value)
			}
		}
	}
	return time.Time{}, errors.New("the binary was built without its commit: set SOURCE_DATE_EPOCH")
}

// writePages writes the pages of cmd and of the commands below it.
func writePages(cmd *cobra.Command, date time.Time, dir string) error {
	if !cmd.HasParent() {
		cmd.InitDefaultCompletionCmd("completion") // it has a page as well
	}
	if cmd.HasParent() && !cmd.IsAvailableCommand() {
		return nil
	}
	name := strings.ReplaceAll(cmd.CommandPath(), " ", "-")
	forMan(cmd)
	var page bytes.Buffer
	if err := doc.GenMan(cmd, &doc.GenManHeader{Title: strings.ToUpper(name), Section: "1",
		Date: &date, Source: "Lookaside " + sidecar.Version, Manual: "Lookaside"},
		&page); err != nil {
		return err
	}
	text := strings.Replace(page.String(), date.Format("Jan 2006"), date.Format(time.DateOnly), 1)
	text = manFlag.ReplaceAllString(text, ".TP\n$1\n")
	if err := os.WriteFile(filepath.Join(dir, name+".1"), []byte(text), 0o644); err != nil {
		return err
	}
	for _, c := range cmd.Commands() {
		if err := writePages(c, date, dir); err != nil {
			return err
		}
	}
	return nil
}

// manFlag is how GenMan prints a flag: the text begins with a tab, which readers show differently.
var manFlag = regexp.MustCompile(`(?m)^(?:\.PP\n)?(\\fB-.*)\n\t`)

// forMan changes the texts of cmd, which are for terminals, into the Markdown that GenMan reads.
func forMan(cmd *cobra.Command) {
	cmd.DisableAutoGenTag = true
	cmd.Long = manText(cmp.Or(cmd.Long, cmd.Short))
	cmd.InitDefaultHelpFlag()
	cmd.Flags().VisitAll(func(f *pflag.Flag) {
		name, usage := pflag.UnquoteUsage(f)
		if def := f.DefValue; def != "" && def != "false" && def != "0" && def != "0s" && def != "[]" {
			usage += " (default " + def + ")"
		}
		f.Usage = markdown.Replace(usage)
		if f.Value.Type() == "bool" {
			name = "true|false"
		}
		// GenMan prints the default after the flag's name; the name of the value is more use there.
		f.DefValue, f.Value = markdown.Replace(name), manValue{f.Value}
	})
}

// manText returns a command's text as Markdown. Lines that begin with spaces stay as they are.
func manText(text string) string {
	var out strings.Builder
	table := false
	for line := range strings.Lines(text) {
		if indented := strings.HasPrefix(line, " ") || table && line == "\n"; indented != table {
			out.WriteString("\n```\n")
			table = indented
		}
		if !table {
			line = markdown.Replace(line)
		}
		out.WriteString(line)
	}
	if table {
		out.WriteString("\n```")
	}
	return out.String()
}

// markdown escapes what is special in Markdown.
var markdown = strings.NewReplacer(`\`, `\\`, "`", "\\`", "*", `\*`, "_", `\_`, "[", `\[`, "]", `\]`,
	"<", `\<`, ">", `\>`, "|", `\|`, "#", `\#`)

// manValue is a flag's value whose default GenMan prints without quotes.
type manValue struct{ pflag.Value }

// Type implements pflag.Value.
func (manValue) Type() string { return "value" }
