package sidecar

import (
	"io"
	"runtime"

	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
)

// Version is this release's.
const Version = "0.1.0"

// VersionLine is what `lookaside version` prints.
func VersionLine() string {
	return "lookaside " + Version + " " + runtime.Version() + " " + runtime.GOOS + "/" + runtime.GOARCH
}

// NewLogger returns a logger that writes to w as cfg says.
func NewLogger(cfg LogConfig, w io.Writer) *zap.Logger {
	ec := zap.NewProductionEncoderConfig()
	ec.EncodeTime = zapcore.ISO8601TimeEncoder
	ec.EncodeDuration = zapcore.StringDurationEncoder
	enc := zapcore.NewConsoleEncoder(ec)
	if cfg.Format == "json" {
		enc = zapcore.NewJSONEncoder(ec)
	}
	return zap.New(zapcore.NewCore(enc, zapcore.Lock(zapcore.AddSync(w)), cfg.level()))
}
