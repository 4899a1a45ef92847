package doctor

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"lookaside/internal/bytesize"
)

// GPU is the result of the copy check, as python -m lookaside.gpucheck writes it.
type GPU struct {
	Python string `json:"-"`
	// Err is why there is no result, or "".
	Err string `json:"error"`
	// Missing says what is not there to check: lookaside, torch or gpu; "" if all is.
	Missing string   `json:"missing"`
	Device  string   `json:"device"`
	Bytes   int64    `json:"bytes"` // of each copy
	Store   Copy     `json:"store"` // GPU to host
	Load    Copy     `json:"load"`  // host to GPU
	Wrong   []string `json:"wrong"` // copies whose bytes differ
}

// Copy has the speeds of one direction, in bytes a second.
type Copy struct {
	Ours float64 `json:"ours"` // page by page, as the connector copies
	Bare float64 `json:"bare"` // the same buffers in one cudaMemcpy; 0: not measured
}

// FindPython returns the interpreter that the copy check runs with if none is named: that of the
// virtual environment, else the first python3 of PATH, else "".
func FindPython(environ []string) string {
	for _, e := range environ {
		if dir, ok := strings.CutPrefix(e, "VIRTUAL_ENV="); ok && dir != "" {
			if p := filepath.Join(dir, "bin", "python"); isFile(p) {
				return p
			}
		}
	}
	for _, name := range []string{"python3", "python"} {
		if p, err := exec.LookPath(name); err == nil {
			return p
		}
	}
	return ""
}

func isFile(path string) bool {
	info, err := os.Stat(path)
	return err == nil && !info.IsDir()
}

// runGPU runs the copy check. It kills it at the deadline.
func runGPU(ctx context.Context, o *Options) *GPU {
	g := &GPU{Python: o.Python}
	if o.Python == "" {
		g.Missing, g.Err = "lookaside", "no python3 is in PATH"
		return g
	}
	ctx, cancel := context.WithTimeout(ctx, o.GPUTimeout)
	defer cancel()
	cmd := exec.CommandContext(ctx, o.Python,
		append([]string{"-m", "lookaside.gpucheck", "--json"}, o.GPUArgs...)...)
	cmd.Env = o.Environ
	var out, log bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &log
	cmd.WaitDelay = time.Second
	err := cmd.Run()
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		g.Err = fmt.Sprintf("the copy check did not end within %s", o.GPUTimeout)
		return g
	}
	if json.Unmarshal(out.Bytes(), g) == nil && (g.Device != "" || g.Err != "") {
		return g
	}
	lines := strings.Split(strings.TrimSpace(log.String()), "\n")
	g.Err = strings.TrimSpace(lines[len(lines)-1])
	if strings.Contains(g.Err, "No module named") {
		g.Missing = "lookaside"
	}
	if g.Err == "" {
		g.Err = fmt.Sprintf("the copy check said nothing: %v", err)
	}
	return g
}

var gpuChecks = []check{{[]string{"gpu-none", "gpu-failed", "gpu-bytes", "gpu-slow", "gpu-copies"},
	gpuCopies}}

// gpuSlow is the share of the bare copy's speed below which ours is worth a warning.
const gpuSlow = 0.7

func gpuCopies(f *Facts) []Finding {
	g := f.GPU
	const subject = "copies on the GPU"
	if g == nil {
		return nil
	}
	speed := func(c Copy) string {
		s := bytesize.Format(int64(c.Ours)) + "/s"
		if c.Bare > 0 {
			s += fmt.Sprintf(" (%.0f %% of a bare copy's %s/s)", 100*c.Ours/c.Bare,
				bytesize.Format(int64(c.Bare)))
		}
		return s
	}
	seen := fmt.Sprintf("%s: stores %s, loads %s, in copies of %s", g.Device, speed(g.Store),
		speed(g.Load), bytesize.Format(g.Bytes))
	slow := func(c Copy) bool { return c.Bare > 0 && c.Ours < gpuSlow*c.Bare }
	switch {
	case g.Missing == "lookaside":
		return one("gpu-none", Error, subject, fmt.Sprintf("%s cannot run the check: %s", g.Python,
			g.Err), "name the Python that vLLM runs with: --python /path/to/venv/bin/python, with the connector installed in it")
	case g.Missing != "":
		return one("gpu-none", Warning, subject, "nothing was copied: "+g.Err,
			"run it where the GPU is, with the Python that vLLM runs with (--python); in a container, pass the GPUs to it (--gpus all)")
	case g.Err != "":
		return one("gpu-failed", Error, subject, g.Err,
			"nvidia-smi and dmesg say whether the GPU is well; with cuMemHostRegister in the message, raise RLIMIT_MEMLOCK (ulimit -l unlimited)")
	case len(g.Wrong) > 0:
		return one("gpu-bytes", Error, subject,
			"copies changed bytes: "+strings.Join(g.Wrong, ", ")+"; "+seen,
			"do not use the connector on this GPU: report it with the output of lookaside doctor --gpu --json")
	case slow(g.Store) || slow(g.Load):
		return one("gpu-slow", Warning, subject, seen,
			"see that nothing else uses the GPU's link now; a driver of release 570 or later copies many runs in one call; bind vLLM and the arena to the GPU's NUMA node (arena.numa)")
	}
	return one("gpu-copies", OK, subject, seen+"; all bytes are right", "")
}
