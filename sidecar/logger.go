package sidecar

import (
	"fmt"
	"io"
	"runtime"
	"runtime/debug"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"

	"lookaside/ipc"
	"lookaside/sidecar/settings"
)

// Version is the version of this release.
const Version = "0.1.0"

// Revision returns the commit that the program was built from, with "-dirty" behind it if files had
// been changed. It returns "unknown" if the program was not built in a git repository.
func Revision() string {
	info, _ := debug.ReadBuildInfo()
	return revisionOf(info)
}

func revisionOf(info *debug.BuildInfo) string {
	revision, dirty := "unknown", ""
	if info != nil {
		for _, s := range info.Settings {
			switch {
			case s.Key == "vcs.revision" && s.Value != "":
				revision = s.Value[:min(12, len(s.Value))]
			case s.Key == "vcs.modified" && s.Value == "true":
				dirty = "-dirty"
			}
		}
	}
	return revision + dirty
}

// VersionLine returns what `lookaside version` and `lookaside --version` print.
func VersionLine() string {
	return fmt.Sprintf("lookaside %s (commit %s) %s libzmq %s %s/%s", Version, Revision(),
		runtime.Version(), ipc.LibraryVersion(), runtime.GOOS, runtime.GOARCH)
}

// NewLogger returns a logger that writes to w as cfg says. Of a message that repeats quickly it
// writes some lines, then how many were left out.
func NewLogger(cfg settings.LogConfig, w io.Writer) *zap.Logger {
	ec := zap.NewProductionEncoderConfig()
	ec.EncodeTime = zapcore.ISO8601TimeEncoder
	ec.EncodeDuration = zapcore.StringDurationEncoder
	enc := zapcore.NewConsoleEncoder(ec)
	if cfg.Format == "json" {
		enc = zapcore.NewJSONEncoder(ec)
	}
	return zap.New(newLimitedCore(enc, zapcore.Lock(zapcore.AddSync(w)), cfg.ZapLevel()))
}
