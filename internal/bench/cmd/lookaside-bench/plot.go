package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"lookaside/internal/bench/hitplot"
	"lookaside/internal/simulate"
)

func newPlot() *cobra.Command {
	return &cobra.Command{
		Use:   "plot REPORT IMAGE",
		Short: "Draw the hit ratios that lookaside simulate --format json has printed",
		Long: `Draw the hit ratios that lookaside simulate --format json has printed.

REPORT is the file that has them; "-" is standard input. IMAGE is the file to write, whose name
ends in .png or .svg.`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			file := args[1]
			format := strings.TrimPrefix(strings.ToLower(filepath.Ext(file)), ".")
			if format != "png" && format != "svg" {
				return fmt.Errorf("%s: want a name that ends in .png or .svg", file)
			}
			var text []byte
			var err error
			if args[0] == "-" {
				text, err = io.ReadAll(cmd.InOrStdin())
			} else {
				text, err = os.ReadFile(args[0])
			}
			if err != nil {
				return err
			}
			var report simulate.Report
			if err := json.Unmarshal(text, &report); err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			var image bytes.Buffer
			if err := hitplot.Draw(&image, format, report); err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			return os.WriteFile(file, image.Bytes(), 0o666)
		},
	}
}
