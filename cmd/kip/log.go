package main

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"strings"

	"github.com/sirupsen/logrus"
	"github.com/urfave/cli/v2"

	"example.com/kip/resolver"
)

// setUpLog sends all logs to standard error, those of containerd's packages too.
func setUpLog(c *cli.Context) error {
	level, err := logLevel(c.String("log-level"))
	if err != nil {
		return err
	}
	if c.Bool("debug") {
		level = slog.LevelDebug
	}
	opts := &slog.HandlerOptions{Level: level}
	switch format := c.String("log-format"); format {
	case "text":
		slog.SetDefault(slog.New(slog.NewTextHandler(c.App.ErrWriter, opts)))
	case "json":
		slog.SetDefault(slog.New(slog.NewJSONHandler(c.App.ErrWriter, opts)))
	default:
		return fmt.Errorf("--log-format is %q: it must be text or json", format)
	}
	bridgeLogrus(level)
	return nil
}

// logLevel reads a level by the old KIP's names, which are Python's.
func logLevel(name string) (slog.Level, error) {
	switch strings.ToUpper(name) {
	case "DEBUG":
		return slog.LevelDebug, nil
	case "INFO":
		return slog.LevelInfo, nil
	case "WARN", "WARNING":
		return slog.LevelWarn, nil
	case "ERROR", "CRITICAL":
		return slog.LevelError, nil
	}
	return 0, fmt.Errorf("--log-level (KIP_LOG_LEVEL) is %q: it must be one of DEBUG, INFO, WARN, ERROR", name)
}

// bridgeLogrus makes containerd's packages, which log with logrus, log to slog.
func bridgeLogrus(level slog.Level) {
	logrus.SetOutput(io.Discard)
	if level <= slog.LevelDebug {
		logrus.SetLevel(logrus.DebugLevel)
	}
	logrus.StandardLogger().ReplaceHooks(logrus.LevelHooks{})
	logrus.AddHook(bridge{})
}

type bridge struct{}

// Levels returns all levels.
func (bridge) Levels() []logrus.Level { return logrus.AllLevels }

// bridged are the fields that are handed on. Others can hold secrets: headers
// such as Location, the body of a token service's answer.
var bridged = []string{"host", "method", "url", "digest", "mediatype", "size", "response.status", "attempt", "dir", "error"}

// Fire hands a line on. What a library finds worth a line is not what kip's user
// wants to read, so all but its errors go to the debug level.
func (bridge) Fire(e *logrus.Entry) error {
	level := slog.LevelDebug
	if e.Level <= logrus.ErrorLevel {
		level = slog.LevelWarn
	}
	attrs := []slog.Attr{slog.String("from", "containerd client")}
	for _, key := range bridged {
		if v, ok := e.Data[key]; ok {
			attrs = append(attrs, slog.String(key, resolver.Sanitize(fmt.Sprint(v))))
		}
	}
	slog.LogAttrs(context.Background(), level, resolver.Sanitize(e.Message), attrs...)
	return nil
}
