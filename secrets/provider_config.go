package secrets

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"sigs.k8s.io/yaml"
)

// providerConfig is a CredentialProviderConfig of kubelet.config.k8s.io/v1, as the kubelet takes it by
// --image-credential-provider-config.
type providerConfig struct {
	APIVersion string           `json:"apiVersion"`
	Kind       string           `json:"kind"`
	Providers  []providerFields `json:"providers"`
}

// providerFields is one program that gives credentials.
type providerFields struct {
	Name                 string          `json:"name"`
	MatchImages          []string        `json:"matchImages"`
	DefaultCacheDuration *duration       `json:"defaultCacheDuration"`
	APIVersion           string          `json:"apiVersion"`
	Args                 []string        `json:"args"`
	Env                  []variable      `json:"env"`
	TokenAttributes      json.RawMessage `json:"tokenAttributes"`
}

type variable struct {
	Name  string `json:"name"`
	Value string `json:"value"`
}

// duration is a time as Kubernetes writes it, such as "10m0s".
type duration time.Duration

func (d *duration) UnmarshalJSON(b []byte) error {
	var text string
	if err := json.Unmarshal(b, &text); err != nil {
		return errors.New("a duration must be a string such as 10m")
	}
	parsed, err := time.ParseDuration(text)
	if err == nil && parsed < 0 {
		err = errors.New("it is negative")
	}
	if err != nil {
		return fmt.Errorf("bad duration: %w", err)
	}
	*d = duration(parsed)
	return nil
}

const configVersion = "kubelet.config.k8s.io/v1"

// providerVersions are the protocols that a program may speak; kip uses nothing that differs between them.
var providerVersions = []string{
	"credentialprovider.kubelet.k8s.io/v1", "credentialprovider.kubelet.k8s.io/v1beta1", "credentialprovider.kubelet.k8s.io/v1alpha1",
}

// readProviderConfig reads a file, or the *.json, *.yaml and *.yml files of a folder in the order of their names.
func readProviderConfig(path string) ([]providerFields, error) {
	files := []string{path}
	if info, err := os.Stat(path); err != nil {
		return nil, err
	} else if info.IsDir() {
		entries, err := os.ReadDir(path)
		if err != nil {
			return nil, err
		}
		files = nil
		for _, e := range entries {
			if slices.Contains([]string{".json", ".yaml", ".yml"}, filepath.Ext(e.Name())) {
				files = append(files, filepath.Join(path, e.Name()))
			}
		}
	}
	var all []providerFields
	for _, file := range files {
		data, _, err := readFile(file)
		if err != nil {
			return nil, fmt.Errorf("reading %s: %w", file, err)
		}
		var config providerConfig
		if err := yaml.UnmarshalStrict(data, &config); err != nil {
			return nil, fmt.Errorf("reading %s: %w", file, err)
		}
		if config.Kind != "CredentialProviderConfig" || config.APIVersion != configVersion {
			return nil, fmt.Errorf("%s is no CredentialProviderConfig of %s", file, configVersion)
		}
		all = append(all, config.Providers...)
	}
	return all, nil
}

// check refuses what the kubelet refuses.
func (f providerFields) check(binDir string) error {
	switch {
	case f.Name == "", f.Name == ".", f.Name == "..", strings.ContainsAny(f.Name, "/ "):
		return fmt.Errorf("the name %q is no file's name", f.Name)
	case len(f.MatchImages) == 0:
		return errors.New("matchImages is empty")
	case f.DefaultCacheDuration == nil:
		return errors.New("defaultCacheDuration is missing")
	case !slices.Contains(providerVersions, f.APIVersion):
		return fmt.Errorf("apiVersion %q is none of %s", f.APIVersion, strings.Join(providerVersions, ", "))
	}
	for _, pattern := range f.MatchImages {
		if _, err := parseLocation(pattern); err != nil {
			return fmt.Errorf("matchImages %q: %w", pattern, err)
		}
	}
	info, err := os.Stat(filepath.Join(binDir, f.Name))
	if err == nil && (info.IsDir() || info.Mode()&0o111 == 0) {
		err = errors.New("it is no program")
	}
	return err
}

// lint warns of what passes the kubelet's checks and never works.
func (f providerFields) lint() (warnings []string) {
	for _, pattern := range f.MatchImages {
		if strings.Contains(pattern, "://") || strings.HasSuffix(pattern, "/*") {
			warnings = append(warnings, fmt.Sprintf("matchImages %q never matches: it must be a host with a path, without a scheme and without a * in the path", pattern))
		}
	}
	return warnings
}
